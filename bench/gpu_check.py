"""Are the kernels and the engine right and fast on this GPU?

One command for the few minutes in which a GPU is at hand: everything that cannot be known without
one is checked and timed, within a limit that includes compilation. Nothing is fetched, and nothing
beyond torch, triton, transformers, numpy, sortedcontainers, safetensors and tokenizers is imported;
Sapwood comes from this checkout.

    python bench/gpu_check.py                    all sections, 8 minutes at most
    python bench/gpu_check.py --only decode tree
    python bench/gpu_check.py --dry              tiny sizes in Triton's interpreter, without a GPU

The kernel suite runs first, in several processes at once. Beside it all other sections are
rehearsed, so that their kernels are compiled when they are timed, alone, one after the other.
Results are merged into `bench/results/gpu-<card>.{json,md}` after every section. The exit status is
0 where all sections are complete and every bar is met, 1 where not, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import make_parser
from gpu.processes import NO_DEVICE, Outcome, Worker
from gpu.report import Report
from gpu.sections import SECTION_BY_NAME, SECTIONS, Scale

MAX_SHARDS = 12
SIDE_BY_SIDE_SECONDS = 150  # for the kernel suite and the rehearsals together


def main() -> int:
    arguments = _parse()
    scale = Scale.DRY if arguments.dry else Scale.FULL
    names = arguments.only or [section.name for section in SECTIONS if section.is_default]
    names = [section.name for section in SECTIONS if section.name in names]
    with tempfile.TemporaryDirectory(prefix="sapwood-gpu-check-") as folder:
        out = arguments.out or (Path(folder) / "dry" if arguments.dry else None)
        report = Report(scale, out)
        check = Check(scale, arguments.minutes * 60, Path(folder), report)
        status = check.run(names, arguments.shards)
        if status != NO_DEVICE:
            print(report.markdown)
        return status


class Check:
    """Runs sections within a time, in processes, and reports each as soon as it is known."""

    def __init__(self, scale: Scale, seconds: float, folder: Path, report: Report) -> None:
        self._scale = scale
        self._end = time.monotonic() + seconds
        self._folder = folder
        self._report = report
        self._is_good = True
        self._has_no_device = False

    def run(self, names: Sequence[str], num_shards: int) -> int:
        """The exit status."""
        sharded = [name for name in names if SECTION_BY_NAME[name].is_sharded]
        measured = [name for name in names if not SECTION_BY_NAME[name].is_sharded]
        self._run_side_by_side(sharded, measured if len(names) > 1 else [], num_shards)
        self._run_one_by_one(measured)
        if self._has_no_device:
            _tell("torch sees no GPU here; --dry runs the check without one")
            return NO_DEVICE
        return 0 if self._is_good else 1

    def _run_side_by_side(
        self, sharded: Sequence[str], rehearsed: Sequence[str], num_shards: int
    ) -> None:
        """What is not timed: the shards, and a rehearsal of each other section."""
        num_shards = 1 if self._scale is Scale.DRY else num_shards
        rehearsed = [] if self._scale is Scale.DRY else rehearsed
        with ThreadPoolExecutor(max_workers=max(1, num_shards + len(rehearsed))) as pool:
            rehearsals = [pool.submit(self._rehearse, name) for name in rehearsed]
            for name in sharded:
                shards = [(index, num_shards) for index in range(num_shards)]
                found = pool.map(lambda shard: self._outcomes([name], shard=shard), shards)  # noqa: B023
                outcomes = [outcome for of_shard in found for outcome in of_shard]
                if outcomes:
                    self._add(outcomes)
            for rehearsal in rehearsals:
                rehearsal.result()

    def _rehearse(self, name: str) -> None:
        for outcome in self._outcomes([name], scale=Scale.REHEARSAL):
            if outcome.status != "complete":
                _tell(f"{name}: its rehearsal {outcome.status}: {(outcome.error or '')[-300:]}")

    def _run_one_by_one(self, names: Sequence[str]) -> None:
        """What is timed, in one process, and in a further one from where a section broke it."""
        left = list(names)
        while left and not self._has_no_device:
            if (seconds := self._end - time.monotonic()) < 1:
                _tell(f"no time is left for {', '.join(left)}")
                self._is_good = False
                return
            worker = Worker.of(left, self._scale, seconds, self._folder)
            known = []
            for outcome in worker.outcomes():
                known.append(outcome.section)
                self._add([outcome])
            self._has_no_device = worker.has_no_device
            if not known and not self._has_no_device:
                self._add([Outcome(left[0], status="crashed", error=worker.log)])
                known = left[:1]
            left = [name for name in left if name not in known]

    def _outcomes(
        self,
        names: Sequence[str],
        *,
        scale: Scale | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> list[Outcome]:
        seconds = min(self._end - time.monotonic(), SIDE_BY_SIDE_SECONDS)
        worker = Worker.of(names, scale or self._scale, seconds, self._folder, shard)
        outcomes = list(worker.outcomes())
        self._has_no_device |= worker.has_no_device
        if not outcomes and not worker.has_no_device:
            outcomes = [Outcome(names[0], status="crashed", error=worker.log)]
        return outcomes

    def _add(self, outcomes: Sequence[Outcome]) -> None:
        is_good = self._report.add(outcomes)
        self._is_good = self._is_good and is_good
        status = next((o.status for o in outcomes if o.status != "complete"), "complete")
        _tell(f"{outcomes[0].section}: {status}{'' if is_good else ', not as it should be'}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SECTION_BY_NAME), help="sections to run")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, without a GPU")
    parser.add_argument("--minutes", type=float, default=8, help="for everything together")
    parser.add_argument(
        "--shards",
        type=int,
        default=max(1, min(MAX_SHARDS, len(os.sched_getaffinity(0)) - 4)),
        help="processes that share the kernel suite",
    )
    parser.add_argument("--out", type=Path, help="results, without suffix; default: by the card")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
