"""The files that say what kernels take: a form is a line of each."""

import json
from pathlib import Path

from kernel_resources import MULTIPROCESSORS, as_json, markdown

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_each_form_is_one_line_and_the_whole_is_json() -> None:
    facts = {"commit": None, "machine": {"system": "a"}, "settings": {}}
    forms = [{"name": f"copy, {index}", "registers": index} for index in range(3)]
    for some in (forms, forms[:1]):
        text = as_json(facts, some)
        assert json.loads(text) == {**facts, "forms": some}
        lines = [line for line in text.splitlines() if '"registers"' in line]
        assert [json.loads(line.removesuffix(",")) for line in lines] == some


def test_the_results_are_as_they_would_be_written() -> None:
    text = (RESULTS / "kernel-resources.json").read_text(encoding="utf-8")
    facts = json.loads(text)
    forms = facts.pop("forms")
    assert text == as_json(facts, forms)
    assert (RESULTS / "kernel-resources.md").read_text(encoding="utf-8") == markdown(forms)
    for form in forms:
        assert form["resident_programs"] == MULTIPROCESSORS[form["target"]].resident(form)
