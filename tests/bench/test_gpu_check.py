"""The GPU check where there is no GPU: all of it at tiny sizes, and what it makes of failures."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu.draws import wrong_rows
from gpu.engine import busy_share, busy_time, graphs_at_start
from gpu.processes import Outcome, Worker, environment_of
from gpu.report import Report, merged_rows
from gpu.sections import SECTIONS, Scale

from sapwood.kernels import load_kernels
from tests.kernels.drawing_oracle import Draw, params_of

ROOT = Path(__file__).parents[2]

# Of ours or of the tests, and not on a machine that has just torch and what comes with it.
REFUSED = (
    "pydantic",
    "fastapi",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "openai",
    "httpx",
    "jinja2",
    "llguidance",
    "outlines",
    "outlines_core",
    "gguf",
    "typer",
    "rich",
    "pytest",
    "hypothesis",
    "jsonschema",
    "xgrammar",
)

SITE = """
import importlib.machinery, socket

found = importlib.machinery.PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {refused!r} else found(name, path, target)

def no_network(self, address):
    raise OSError(f"there is no network to reach {{address}}")

importlib.machinery.PathFinder.find_spec = find_spec
socket.socket.connect = socket.socket.connect_ex = no_network
"""


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, dict[str, object]]]:
    """Exit status and sections of `--dry`, with nothing to import but what is allowed."""
    folder = tmp_path_factory.mktemp("dry")
    (folder / "sitecustomize.py").write_text(SITE.format(refused=REFUSED))
    command = [sys.executable, "bench/gpu_check.py", "--dry", "--out", str(folder / "dry")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (folder / "dry.json").is_file(), done.stderr
    return done.returncode, json.loads((folder / "dry.json").read_text())["sections"]


def test_dry_runs_every_section_with_nothing_beside_what_such_a_machine_has(
    dry_run: tuple[int, dict[str, dict[str, object]]],
) -> None:
    status, sections = dry_run
    assert set(sections) == {section.name for section in SECTIONS if section.is_default}
    for name, section in sections.items():
        assert section["status"] == "complete", f"{name}: {section['errors']}"
        assert section["rows"], f"{name} has no rows"
        unmet = [row["name"] for row in section["rows"] if row["is_met"] is False]  # type: ignore[index]
        assert not unmet, f"{name}: {unmet}"
    assert status == 0


def test_what_is_refused_in_the_dry_run_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE.format(refused=REFUSED))
    code = (
        "import importlib, socket\n"
        f"for name in {REFUSED!r}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError: continue\n"
        "    raise SystemExit(name)\n"
        "try: socket.create_connection(('127.0.0.1', 9))\n"
        "except OSError as error: assert 'no network' in str(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_without_a_gpu_the_check_says_so() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "bench/gpu_check.py", "--only", "bandwidth"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr


def worker(folder: Path, script: str, seconds: float = 20.0, grace: float = 0.0) -> Worker:
    """A process that writes lines as the script says, in place of running sections."""
    path = folder / "worker.py"
    path.write_text(
        "import json, sys, time\n"
        "file = open(sys.argv[-1], 'a')\n"
        "def say(event, **values):\n"
        "    line = json.dumps({'event': event, 'section': 'decode', **values})\n"
        "    print(line, file=file, flush=True)\n" + textwrap.dedent(script)
    )
    command = [sys.executable, str(path)]
    return Worker(command, folder, seconds=seconds, environment=os.environ, grace=grace)


BEGIN = "say('facts', facts={'card': 'a card'})\nsay('begin', clocks=None)\n"
ROW = "say('row', row={'name': 'first', 'figures': {}, 'bar': None, 'is_met': None})\n"


def test_what_a_section_found_before_its_process_crashed_is_kept(tmp_path: Path) -> None:
    script = (
        BEGIN + ROW + "print('an illegal memory access'); sys.stdout.flush()\nimport os; os.abort()"
    )
    (outcome,) = worker(tmp_path, script).outcomes()
    assert outcome.status == "crashed"
    assert [row["name"] for row in outcome.rows] == ["first"]
    assert "an illegal memory access" in (outcome.error or "")


def test_a_section_that_hangs_is_ended_and_what_it_found_is_kept(tmp_path: Path) -> None:
    hanging = BEGIN + ROW + "time.sleep(600)"
    (outcome,) = worker(tmp_path, hanging, seconds=8.0, grace=600.0).outcomes()
    assert outcome.status == "timed out"
    assert len(outcome.rows) == 1


def test_a_process_does_not_outlive_whoever_reads_what_it_finds(tmp_path: Path) -> None:
    """As where the check is interrupted: it would keep its memory of the device."""
    end = "say('end', error=None, seconds=1.0, clocks=None)\n"
    running = worker(tmp_path, BEGIN + end + BEGIN + "time.sleep(600)")
    outcomes = running.outcomes()
    assert next(outcomes).status == "complete"
    outcomes.close()  # type: ignore[attr-defined]
    assert running._process.poll() is not None


def test_a_section_that_raises_has_failed_and_the_next_one_runs(tmp_path: Path) -> None:
    end = "say('end', error={error!r}, seconds=1.0, clocks=None)\n"
    script = BEGIN + end.format(error="ValueError: no") + "say('begin', clocks=None)\n"
    failed, complete = worker(tmp_path, script + ROW + end.format(error=None)).outcomes()
    assert (failed.status, failed.error) == ("failed", "ValueError: no")
    assert (complete.status, len(complete.rows)) == ("complete", 1)
    assert complete.facts == {"card": "a card"}


def row(name: str, is_met: bool | None = True, **figures: int) -> dict[str, object]:
    return {"name": name, "figures": figures, "bar": None, "is_met": is_met}


def test_rows_of_several_processes_are_added_up() -> None:
    merged = merged_rows(
        [row("a", cases=2, passed=2), row("b"), row("a", False, cases=3, passed=1)]
    )
    assert merged == [row("a", False, cases=5, passed=3), row("b")]


def test_a_failure_with_the_name_of_its_claim_is_reported_with_the_counts_of_all_processes() -> (
    None
):
    def row(is_met: bool, **figures: object) -> dict[str, object]:
        bar = None if "failure" in figures else "all pass"
        return {"name": "claim", "figures": figures, "bar": bar, "is_met": is_met}

    rows = [
        row(False, failure="AssertionError: far off"),
        row(False, cases=1, passed=0),
        row(False, failure="AssertionError: elsewhere"),
        row(True, cases=2, passed=2),
    ]
    (merged,) = merged_rows(rows)
    expected = {"failure": "AssertionError: far off", "cases": 3, "passed": 2}
    assert merged == {**row(False, **expected), "bar": "all pass"}


def test_what_is_rehearsed_beside_others_computes_on_one_thread() -> None:
    assert environment_of(Scale.REHEARSAL)["OMP_NUM_THREADS"] == "1"
    given = os.environ.get("OMP_NUM_THREADS")
    assert environment_of(Scale.FULL).get("OMP_NUM_THREADS") == given


def test_a_section_that_is_run_again_replaces_itself_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "gpu-h200"
    first = Report(Scale.FULL, path)
    assert first.add([Outcome("decode", status="complete", rows=[row("old")])])
    assert first.add([Outcome("tree", status="complete", rows=[row("kept")])])
    again = Report(Scale.FULL, path)
    assert not again.add([Outcome("decode", status="complete", rows=[row("new", False)])])
    sections = json.loads((tmp_path / "gpu-h200.json").read_text())["sections"]
    assert [r["name"] for r in sections["decode"]["rows"]] == ["new"]
    assert [r["name"] for r in sections["tree"]["rows"]] == ["kept"]
    assert "**no**" in (tmp_path / "gpu-h200.md").read_text()


def test_a_section_that_did_not_end_is_not_good(tmp_path: Path) -> None:
    report = Report(Scale.FULL, tmp_path / "gpu-h200")
    crashed = Outcome("decode", status="crashed", error="it broke", rows=[row("met")])
    assert not report.add([crashed])
    assert "it broke" in report.markdown


def test_the_graphs_of_the_sized_engine_can_be_planned_without_a_gpu() -> None:
    plan = graphs_at_start(torch.device("cuda"), vocab_size=160, max_context_len=64)
    assert plan.at_start and plan.row_counts[-1] == 256


def test_overlapping_work_of_the_device_counts_once() -> None:
    intervals = [(8.0, 10.0), (0.0, 4.0), (2.0, 6.0), (3.0, 5.0)]
    assert busy_time(intervals) == pytest.approx(8.0)
    assert busy_share(intervals) == pytest.approx(0.8)
    assert busy_share([]) == 0.0


@pytest.mark.parametrize(
    ("draw", "right"),
    [
        ({"noise": 0.3}, [1]),
        ({"noise": 0.25}, [0, 1]),  # where the second quarter begins
        ({"noise": 0.25 - 2**-40}, [0]),
        (
            {"noise": 0.9, "top_p": 0.5},
            [1, 2],
        ),  # half lies before the third, which is none too little
        ({"noise": 0.9, "top_p": 0.5 - 2**-40}, [1]),
        ({"noise": 0.9, "min_p": 1.0}, [3]),
        ({"noise": 0.9, "top_k": 2}, [1]),
        ({"noise": 0.25, "temperature": 0.0}, [0]),  # the first of the best, whatever the noise
    ],
    ids=str,
)
def test_a_token_may_be_another_only_beside_a_border(
    draw: dict[str, float], right: list[int]
) -> None:
    """Of four equal tokens. The rows around it have torch's."""
    logits = torch.zeros(3, 4)
    params = params_of([Draw(noise=0.6), Draw(**draw), Draw(noise=0.6)], logits.device)
    expected = load_kernels("reference").draw_tokens(logits, params).token_ids
    for token in range(4):
        drawn = expected.clone()
        drawn[1] = token
        wrong = wrong_rows(drawn, expected, logits, params).tolist()
        assert wrong == ([] if token in right else [1]), token


def test_min_p_may_take_or_leave_what_has_just_that_share() -> None:
    logits = torch.tensor([[0.0, -0.7]])
    share = float(np.exp(np.float64(np.float32(-0.7))))
    for min_p, right in ((share, [0, 1]), (share * 1.001, [0]), (share * 0.999, [1])):
        params = params_of([Draw(noise=0.9, min_p=min_p)], logits.device)
        expected = load_kernels("reference").draw_tokens(logits, params).token_ids
        for token in (0, 1):
            wrong = wrong_rows(torch.tensor([token]), expected, logits, params)
            assert (len(wrong) == 0) == (token in right), (min_p, token)
