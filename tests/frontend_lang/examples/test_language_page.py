"""docs/language.md: its examples run as they stand, with the real model."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sapwood as sgl

if TYPE_CHECKING:
    from sapwood import Engine

PAGE = Path(__file__).parents[3] / "docs" / "language.md"
README = PAGE.parents[1] / "README.md"


def blocks(page: Path) -> list[tuple[str, str]]:
    """The Python of a page: its heading with the line, and the code at its own line."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[: match.start(1)]
        heading = re.findall(r"^#+ (.+)$", before, re.MULTILINE)[-1]
        line = before.count("\n")
        found.append((f"{heading}, line {line + 1}", "\n" * line + match[1]))
    return found


PRELUDE, *EXAMPLES = blocks(PAGE)


@pytest.fixture
def names(engine: "Engine", monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a reader has after the page's first lines, with the engine that the tests share."""
    after: dict[str, Any] = {"__name__": "page"}
    monkeypatch.setattr(sgl, "Engine", lambda model: engine)
    exec(compile(PRELUDE[1], PAGE.name, "exec"), after)
    monkeypatch.setattr(sgl, "Engine", lambda model: nullcontext(engine))  # it stays open
    yield after
    sgl.set_default_backend(None)


@pytest.mark.real_model
@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_an_example_of_the_page_runs(code: str, names: dict[str, Any], server_url: str) -> None:
    code = code.replace("http://127.0.0.1:8000", server_url)
    exec(compile(code, PAGE.name, "exec"), names)


@pytest.mark.real_model
def test_the_readmes_program_runs(
    engine: "Engine", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = [code for _, code in blocks(README) if "@sgl.function" in code]
    monkeypatch.setattr(sgl, "Engine", lambda model: nullcontext(engine))
    exec(compile(code, README.name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


PRIMITIVES = (
    "function gen gen_int gen_string select system user assistant user_begin user_end "
    "separate_reasoning var_scope fork copy join set_var get_var get_meta_info get text messages "
    "text_iter text_async_iter run arun aget run_batch bind with_options trace cache flush_cache "
    "get_server_info set_default_backend pause timeout on_error output_type grammar"
).split()


@pytest.mark.parametrize("name", PRIMITIVES)
def test_every_primitive_is_in_an_example(name: str) -> None:
    assert any(re.search(rf"\b{name}\b", code) for _, code in [PRELUDE, *EXAMPLES])
