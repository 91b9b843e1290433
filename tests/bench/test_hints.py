"""The replay of programs: both traces end, and hints change no amount of work asked for."""

import argparse
from typing import Any

import hints as bench
import pytest


def replayed(fill: Any, say: Any) -> tuple[dict[str, Any], int]:
    arguments = argparse.Namespace(
        seconds=3, agents=0.7, trees=0.7, singles=2, teams=3, max_num_seqs=8,
        max_num_batched_tokens=512, step_seconds=0.01, row_seconds=1e-5,
    )  # fmt: skip
    replay = bench.Replay(arguments, 256, say, say)
    fill(replay, arguments, 0)
    return replay.run(), replay._scheduler.counters.prompt_tokens


@pytest.mark.parametrize("fill", [bench.crowd, bench.flood])
def test_a_trace_is_the_same_with_and_without_hints(fill: Any) -> None:
    silent, silent_tokens = replayed(fill, bench.silent)
    told, told_tokens = replayed(fill, bench.everything)
    assert silent_tokens == told_tokens > 0
    finished = [
        {kind: figures["num_finished"] for kind, figures in result["kinds"].items()}
        for result in (silent, told)
    ]
    assert finished[0] == finished[1]
    assert silent["requests_back_at_a_warm_prefix"] == 0
