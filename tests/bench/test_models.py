"""The sweep over transformers' architectures: its committed results, the document made of them, and
a few types run again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import models
import pytest
import transformers

from sapwood.runtime.models import MODELS

SERVED = ("native", "right")


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads(models.RESULT.read_text(encoding="utf-8"))


def test_the_document_has_the_marks_and_the_committed_figures(
    result: dict[str, Any], tmp_path: Path
) -> None:
    document = tmp_path / "models.md"
    document.write_text(models.DOCUMENT.read_text(encoding="utf-8"), encoding="utf-8")
    models.write_docs(document, models.RESULT)
    written = document.read_text(encoding="utf-8")
    assert written == models.DOCUMENT.read_text(encoding="utf-8"), (
        "run python bench/models.py --write-docs"
    )
    for name in (*MODELS, *result["models"]):
        assert f"`{name}`" in written


def test_no_architecture_is_silently_wrong(result: dict[str, Any]) -> None:
    for name, of_type in result["models"].items():
        for one in (of_type, *of_type.get("variants", {}).values()):
            assert one["verdict"] in (*SERVED, "refused", "not built"), name
            assert one.get("error", 0.0) <= models.MAX_ERROR, name


def test_the_results_cover_every_causal_model_of_their_transformers(
    result: dict[str, Any],
) -> None:
    if result["transformers"] != transformers.__version__:
        pytest.skip(f"the results are from transformers {result['transformers']}")
    assert sorted(result["models"]) == models.causal_types()


@pytest.mark.parametrize("model_type", ["gpt2", "starcoder2", "bloom"])
def test_a_type_run_again_ends_as_the_results_say(model_type: str, result: dict[str, Any]) -> None:
    verdict = result["models"][model_type]["verdict"]
    again = models.run_type(model_type)["verdict"]
    assert again in SERVED if verdict in SERVED else again == verdict


def test_what_cannot_be_built_is_told_as_such() -> None:
    assert models.tiny_config("reformer", models.VARIANTS["windows"]) is None
    assert "KeyError" in models.tiny_config("none_such", {})


@pytest.mark.slow
def test_no_architecture_of_the_installed_transformers_is_silently_wrong(tmp_path: Path) -> None:
    out = tmp_path / "models.json"
    command = [sys.executable, str(common.ROOT / "bench" / "models.py"), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(common.ROOT)}
    subprocess.run(command, check=True, cwd=common.ROOT, env=environment)
    verdicts = {n: r["verdict"] for n, r in json.loads(out.read_text())["models"].items()}
    assert sorted(verdicts) == models.causal_types()
    assert [name for name, verdict in verdicts.items() if verdict == "wrong"] == []
    assert sum(verdict in SERVED for verdict in verdicts.values()) > 50
