"""The kernel suite of tests/kernels, on the device."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import torch

from gpu.context import Context
from gpu.sections import Row
from tests.kernels.cases import all_cases
from tests.kernels.claims import Case

EVERY_NTH_WHEN_DRY = 15  # of the claims; the suite itself runs all of them in the interpreter


def kernels(context: Context) -> Iterator[Row]:
    """A row for each claim with its cases, and one for each case that fails."""
    by_claim: dict[str, list[Case]] = {}
    for case in _cases(context):
        by_claim.setdefault(case.name.split("-")[0], []).append(case)
    for claim, cases in by_claim.items():
        failures = []
        for case in cases:
            if (failure := _failure(context, case)) is not None:
                failures.append(Row(name=case.name, figures={"failure": failure}, is_met=False))
        yield from failures
        yield Row(
            name=claim,
            figures={"cases": len(cases), "passed": len(cases) - len(failures)},
            bar="all pass",
            is_met=not failures,
        )


def _cases(context: Context) -> list[Case]:
    """Those of this process: every n-th, so that all processes compile about as much."""
    cases = list(all_cases())
    if context.is_dry:
        first_of_claim = {case.name.split("-")[0]: case for case in reversed(cases)}
        cases = sorted(first_of_claim.values(), key=lambda case: case.name)[::EVERY_NTH_WHEN_DRY]
    index, count = context.shard
    return cases[index::count]


def _failure(context: Context, case: Case) -> str | None:
    """The end of what a case raised. Raises where it broke the device, and all that follows."""
    try:
        case.run(context.kernels, context.device)
        _wait(context)
    except Exception as error:
        try:
            _wait(context)
        except Exception as of_device:
            raise RuntimeError(f"{case.name} broke the device") from of_device
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({last.filename.split('/')[-1]}:{last.lineno})"
    return None


def _wait(context: Context) -> None:
    """Raises what went wrong on the device."""
    if context.device.type == "cuda":
        torch.cuda.synchronize()
