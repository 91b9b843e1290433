"""Every kernel is compiled for every target, without a GPU, in processes that do not interpret."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sapwood.kernels.ahead_of_time import MAX_SHARED_BYTES, TARGETS

NUM_PROCESSES = 2


def compiled(*options: str) -> list[dict[str, Any]]:
    """What the command prints, of as many processes as there are."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "sapwood.kernels.ahead_of_time", *options]
    processes = [
        subprocess.Popen(
            [*command, "--part", f"{index}/{NUM_PROCESSES}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(NUM_PROCESSES)
    ]
    found = []
    for process in processes:
        out, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
        found += [json.loads(line) for line in out.splitlines()]
    return found


@pytest.fixture(scope="module")
def one_of_each() -> list[dict[str, Any]]:
    return compiled("--one-of-each")


def faults(found: list[dict[str, Any]]) -> Iterator[str]:
    for form in found:
        name = f"{form['name']} for sm_{form['target']}"
        if form["spilled_bytes"] and form["target"] >= 90:
            yield f"{name} spills {form['spilled_bytes']} bytes a thread"
        if form["shared_bytes"] > MAX_SHARED_BYTES[form["target"]]:
            yield f"{name} wants {form['shared_bytes']} bytes of shared memory"


def test_one_form_of_every_kernel_compiles_for_every_target_and_fits(
    one_of_each: list[dict[str, Any]],
) -> None:
    assert {form["target"] for form in one_of_each} == set(TARGETS)
    assert list(faults(one_of_each)) == []


def test_wide_attention_multiplies_with_the_widest_instructions_of_each_target(
    one_of_each: list[dict[str, Any]],
) -> None:
    wide = [form for form in one_of_each if "wide" in form["name"]]
    by_target = {form["target"]: form["matrix_instruction"] for form in wide}
    assert by_target == {80: "mma", 90: "wgmma", 100: "tcgen05"}


@pytest.mark.slow
def test_every_form_of_the_tuning_tables_compiles_for_every_target_and_fits() -> None:
    found = compiled()
    assert len(found) % len(TARGETS) == 0
    assert list(faults(found)) == []
