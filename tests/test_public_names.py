"""The public face: every name is there, documented, and the package says what it promises."""

import ast
import tomllib
from pathlib import Path

import pytest

import sapwood

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", sapwood.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(sapwood, name)
    if name != "__version__":
        assert value.__doc__
        assert getattr(value, "__name__", name) == name


def test_the_names_for_type_checkers_are_the_names_at_run_time() -> None:
    tree = ast.parse((ROOT / "sapwood" / "__init__.py").read_text())
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sapwood.")
        for alias in node.names
    }
    assert typed == set(sapwood.__all__) - {"__version__"}


def test_dir_lists_the_public_names() -> None:
    assert set(sapwood.__all__) <= set(dir(sapwood))


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sapwood.no_such_name  # type: ignore[attr-defined]


def test_a_backend_that_is_not_there_is_told_with_what_reaches_its_models() -> None:
    with pytest.raises(AttributeError, match=r"'VertexAI'; OpenAI.*LiteLLM"):
        _ = sapwood.VertexAI  # type: ignore[attr-defined]


def test_every_error_is_of_our_tree() -> None:
    errors = [getattr(sapwood, name) for name in sapwood.__all__ if name.endswith("Error")]
    assert errors
    assert all(issubclass(error, sapwood.SapwoodError) for error in errors)


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sapwood.__version__ == project["version"]
