import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from common import ROOT, spread
from scaling import AXES, DOCUMENT, _chart, _round_step, fill, write_docs

TEXT = (
    "before\n<!-- figures: a -->\nold\n<!-- end -->\nbetween\n<!-- figures: b -->\n<!-- end -->\n"
)


def curve(name: str) -> dict[str, list[dict[str, object]]]:
    points = [
        {
            "x": x,
            "step_seconds": spread([0.01 * (x + 1)]),
            "scheduler_seconds": 0.001,
            "kv_tokens_distinct": 10 * x,
            "kv_tokens_by_request": 20 * x,
        }
        for x in (1, 2, 4)
    ]
    return {"float32": points, "int8": points}


def test_figures_replace_what_is_between_their_own_marks() -> None:
    filled = fill(fill(TEXT, "a", "new"), "b", r"\1 other")
    assert "old" not in filled
    assert filled.startswith("before\n<!-- figures: a -->\n\nnew\n\n<!-- end -->\nbetween\n")
    assert "<!-- figures: b -->\n\n\\1 other\n\n<!-- end -->" in filled


def test_filling_twice_is_filling_once() -> None:
    assert fill(fill(TEXT, "a", "new"), "a", "new") == fill(TEXT, "a", "new")


def test_figures_without_marks_are_refused() -> None:
    with pytest.raises(ValueError, match="figures: c"):
        fill(TEXT, "c", "new")


def test_the_document_has_marks_for_every_curve(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(DOCUMENT.read_text(encoding="utf-8"), encoding="utf-8")
    result = {
        "machine": {"processor": "a processor", "num_threads": 2, "torch": "0"},
        "commit": None,
        "curves": {name: curve(name) for name in AXES},
    }
    (tmp_path / "scaling.json").write_text(json.dumps(result), encoding="utf-8")
    write_docs(document, tmp_path)
    written = document.read_text(encoding="utf-8")
    for name in AXES:
        assert f"scaling_{name}.svg" in written
    assert written.count("float32: 20.0 ms at 1, 50.0 ms at 4") == len(AXES)


def test_the_document_lies_in_the_repository() -> None:
    assert DOCUMENT.relative_to(ROOT).parts == ("docs", "performance.md")


@pytest.mark.parametrize("name", AXES)
def test_a_chart_has_a_line_for_each_dtype_inside_its_frame(name: str) -> None:
    root = ElementTree.fromstring(_chart(name, curve(name)))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2
    for line in lines:
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 640 and 0 <= y <= 320


@pytest.mark.parametrize("largest", [0.3, 1.0, 7.9, 8.0, 128, 6144, 99_999])
def test_grid_lines_are_few_and_more_than_one(largest: float) -> None:
    assert 3 <= largest / _round_step(largest) <= 8
