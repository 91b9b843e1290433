"""The README's table of engines: made from the results, and only where they are the project's."""

from pathlib import Path

import common
import peer_report
import pytest


def test_marks_are_filled_again_and_again() -> None:
    text = "before\n<!-- figures: peers -->\nold\n<!-- end -->\nafter\n"
    once = common.fill(text, "peers", "| new |")
    assert "old" not in once
    assert "| new |" in once
    assert common.fill(once, "peers", "| new |") == once
    assert once.startswith("before\n")
    assert once.endswith("after\n")


def test_a_document_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 marks"):
        common.fill("nothing here", "peers", "x")


def test_the_readme_has_the_marks_and_the_committed_figures() -> None:
    result = peer_report.read(common.RESULTS / "peers-cpu.json")
    readme = (common.ROOT / "README.md").read_text(encoding="utf-8")
    assert common.fill(readme, "peers", peer_report.summary(result)) == readme


def test_results_elsewhere_leave_the_readme_alone(tmp_path: Path) -> None:
    readme = (common.ROOT / "README.md").read_text(encoding="utf-8")
    result = peer_report.read(common.RESULTS / "peers-cpu.json")
    changed = result | {"model": "another model"}
    peer_report.write(tmp_path / "peers-cpu.json", changed)
    assert (common.ROOT / "README.md").read_text(encoding="utf-8") == readme
    assert "another model" in (tmp_path / "peers-cpu.md").read_text(encoding="utf-8")
