"""`sapwood tune` where files cannot be had or are broken; nothing is measured."""

import sys
from pathlib import Path

import pytest
import torch

from sapwood.kernels import tuner
from sapwood.kernels.tuning import AttentionTuning, load_table, own_table_path
from sapwood.server.cli import main

GPU = "NVIDIA H200"


class UnchangedShapes:
    """A tuner for which those that it is given are the fastest."""

    num_tuned = 0
    fails = False

    def __init__(self, device: torch.device, timer: object) -> None:
        pass

    def tuned(self, entry: AttentionTuning) -> AttentionTuning:
        type(self).num_tuned += 1
        if self.fails:
            raise RuntimeError("the device is lost")
        return entry


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuner, "gpu_name", lambda: GPU)
    monkeypatch.setattr(tuner, "DeviceTimer", lambda device: None)
    monkeypatch.setattr(tuner, "Tuner", UnchangedShapes)
    monkeypatch.setattr(UnchangedShapes, "num_tuned", 0)


def tune(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """The exit status of the command."""
    monkeypatch.setattr(sys, "argv", ["sapwood", "tune", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_a_broken_table_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    path = own_table_path(GPU)
    path.parent.mkdir(parents=True)
    path.write_text('{"gpu": "NVI')
    assert tune(monkeypatch) == 0
    assert load_table(GPU).gpu == GPU
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("out", [".", "file/table.json"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    out: str,
) -> None:
    (tmp_path / "file").touch()
    assert tune(monkeypatch, "--out", str(tmp_path / out)) == 1
    assert capsys.readouterr().err.startswith("sapwood: ")
    assert UnchangedShapes.num_tuned == 0


def test_a_table_that_is_not_finished_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(UnchangedShapes, "fails", True)
    out = tmp_path / "new" / "table.json"
    out.parent.mkdir()
    out.write_text("what was there")
    with pytest.raises(RuntimeError, match="lost"):
        monkeypatch.setattr(sys, "argv", ["sapwood", "tune", "--out", str(out)])
        main()
    assert [*out.parent.iterdir()] == [out] and out.read_text() == "what was there"
