"""`sapwood demo`: every figure it shows is the engine's, and equal texts are never assumed."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
from rich.console import Console

from sapwood.runtime.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
)
from sapwood.server.cli.demo import NUM_COMPARED, Questions, load_questions, run_demo
from sapwood.server.cli.tree_view import draw_tree, num_common_tokens, snippet

PROMPTS = load_questions().prompts(32)


@dataclass(frozen=True)
class FakeNode:
    depth: int
    token_ids: Any
    num_blocks: int = 1
    num_holders: int = 0


def node(depth: int, text: str, **counts: int) -> FakeNode:
    return FakeNode(depth, np.frombuffer(text.encode(), np.uint8).astype(np.int32), **counts)


def decode(token_ids: Any, *, skip_special_tokens: bool = True) -> str:
    return bytes(token_ids.tolist()).decode()


@dataclass
class FakeEngine:
    """Tokens are bytes; every prompt but the first of a batch is cached up to its question."""

    prefix_caching: bool
    word: str = "same"
    batches: list[list[str]] = field(default_factory=list)
    is_cold: bool = False
    num_computed: int = 0
    num_open: int = 0
    info: Any = field(
        default_factory=lambda: SimpleNamespace(
            model_name="fake",
            device="cpu",
            precision="float32",
            kernels="none",
            block_size=16,
            load_seconds=0.5,
        )
    )
    tokenizer: Any = field(default_factory=lambda: SimpleNamespace(decode=decode))

    def __enter__(self) -> Self:
        self.num_open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.num_open = 0

    def flush_cache(self) -> None:
        self.is_cold = True

    def stats(self) -> Any:
        return SimpleNamespace(computed_tokens=self.num_computed, generated_tokens=0, num_running=0)

    def tree(self) -> Sequence[FakeNode]:
        return [node(0, "Question: shared", num_holders=7)] if self.prefix_caching else []

    def generate(self, inputs: list[str], sampling: Any) -> list[RequestOutput]:
        if inputs != ["Hello"]:
            assert self.is_cold and self.num_open == 1
            self.batches.append(inputs)
        self.is_cold = False
        return [self._answer(i, text) for i, text in enumerate(inputs)]

    def _answer(self, i: int, prompt: str) -> RequestOutput:
        ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
        num_cached = prompt.rindex("Question") if i and self.prefix_caching else 0
        self.num_computed += len(ids) - num_cached
        answer = CompletionOutput(
            index=0,
            text=f" {self.word} {i}",
            token_ids=(1, 2, 3),
            logprobs=None,
            finish_reason=FinishReason.LENGTH,
            stop_reason=None,
        )
        return RequestOutput(
            request_id=str(i),
            prompt_token_ids=ids,
            outputs=(answer,),
            num_cached_tokens=num_cached,
            metrics=RequestMetrics(arrival_time=0.0),
        )


def show(with_tree: FakeEngine, without: FakeEngine, prompts: list[str], baseline: bool) -> str:
    console = Console(file=io.StringIO(), width=140, record=True)
    engines = {True: with_tree, False: without}
    run_demo(console, lambda prefix_caching: engines[prefix_caching], prompts, baseline=baseline)
    return console.export_text()


def test_the_same_prompts_run_in_both_engines_each_on_an_empty_cache() -> None:
    with_tree, without = FakeEngine(True), FakeEngine(False)
    show(with_tree, without, PROMPTS, baseline=True)
    assert with_tree.batches == [PROMPTS[:NUM_COMPARED], PROMPTS]
    assert without.batches == [PROMPTS[:NUM_COMPARED]]
    assert with_tree.num_open == without.num_open == 0


def test_each_request_has_its_line_and_the_totals_add_up() -> None:
    shown = show(FakeEngine(True), FakeEngine(False), PROMPTS, baseline=True)
    num_shared = PROMPTS[0].rindex("Question")
    num_prompt = sum(map(len, PROMPTS))
    num_cached = num_shared * 31
    rows = [line.replace("│", " ").split() for line in shown.splitlines()]
    for i, prompt in enumerate(PROMPTS):
        cached = num_shared if i else 0
        counts = [len(prompt), cached, len(prompt) - cached, 3]
        assert any(row[:5] == [str(i + 1), *(f"{n:,}" for n in counts)] for row in rows)
    assert any(
        row[:4] == [f"{n:,}" for n in (num_prompt, num_cached, num_prompt - num_cached, 96)]
        for row in rows
    )
    assert f"{num_cached / num_prompt:.1%}" in shown


def test_the_runs_show_what_the_engine_counted() -> None:
    shown = show(FakeEngine(True), FakeEngine(False), PROMPTS, baseline=True)
    num_few = sum(map(len, PROMPTS[:NUM_COMPARED]))
    num_shared = PROMPTS[0].rindex("Question")
    rows = [line.split() for line in shown.splitlines()]
    num_computed = num_few - 7 * num_shared
    share = f"{7 * num_shared / num_few:.1%}"
    for measure, without, few in (
        ("prompt tokens", f"{num_few:,}", f"{num_few:,}"),
        ("from the cache", "0.0%", share),
        ("rows computed", f"{num_few:,}", f"{num_computed:,}"),
        ("generated tokens", "24", "24"),
    ):
        cells = [*measure.split(), without, few]
        assert any(row[: len(cells)] == cells for row in rows), measure


def test_equal_texts_are_said_to_be_equal() -> None:
    shown = show(FakeEngine(True), FakeEngine(False), PROMPTS, baseline=True)
    assert shown.count("all 8 the same") == 2


def test_different_texts_are_said_to_differ() -> None:
    shown = show(FakeEngine(True), FakeEngine(False, word="other"), PROMPTS, baseline=True)
    assert shown.count("0 of 8 the same") == 2
    assert "all 8" not in shown


def test_without_the_baseline_nothing_is_compared() -> None:
    with_tree, without = FakeEngine(True), FakeEngine(False)
    shown = show(with_tree, without, PROMPTS[:3], baseline=False)
    assert with_tree.batches == [PROMPTS[:3]]
    assert without.batches == []
    assert "times as fast" not in shown
    assert "3 with the tree" in shown


def test_the_drawing_an_answer_and_the_next_steps_are_shown() -> None:
    shown = show(FakeEngine(True), FakeEngine(False), PROMPTS[:1], baseline=True)
    assert "16 tokens  1 block  7 holding  Question: shared" in shown
    assert "same 0 …" in shown
    for command in ("sapwood chat", "sapwood serve", "curl http://127.0.0.1:8000/v1"):
        assert command in shown


def test_an_engine_that_fails_is_closed_and_its_error_passed_on() -> None:
    class Failing(FakeEngine):
        def generate(self, inputs: list[str], sampling: Any) -> list[RequestOutput]:
            if inputs == ["Hello"]:
                return []
            raise RuntimeError("no more blocks")

    engine = Failing(True)
    with pytest.raises(RuntimeError, match="no more blocks"):
        show(engine, FakeEngine(False), PROMPTS, baseline=False)
    assert engine.num_open == 0


def test_prompts_share_all_but_their_last_question() -> None:
    shared = PROMPTS[0][: PROMPTS[0].rindex("Question: ")]
    assert shared.count("Question: ") == shared.count("Answer: ") == 8
    assert all(prompt.startswith(f"{shared}Question: ") for prompt in PROMPTS)
    assert all(prompt.endswith("\nAnswer:") for prompt in PROMPTS)
    assert len(set(PROMPTS)) == 32
    assert not any("<<" in prompt for prompt in PROMPTS)


def test_the_real_engine_is_what_the_demo_needs(tiny_model: Path) -> None:
    from sapwood.runtime.engine import Engine

    prompts = Questions((("1 + 1?", "2"), ("2 + 2?", "4")), ("3?", "A tree?", "22?")).prompts(3)
    console = Console(file=io.StringIO(), width=140, record=True)
    options: dict[str, Any] = {"num_kv_blocks": 64, "device": "cpu"}

    def make_engine(prefix_caching: bool) -> Engine:
        return Engine(str(tiny_model), prefix_caching=prefix_caching, **options)

    run_demo(console, make_engine, prompts, baseline=True)
    shown = console.export_text()
    rows = [line.replace("│", " ").split() for line in shown.splitlines()]
    with Engine(str(tiny_model), **options) as engine:
        num_prompt = [len(engine.tokenizer.encode(prompt)) for prompt in prompts]
    for i, num in enumerate(num_prompt):
        [row] = [row for row in rows if row[:2] == [str(i + 1), str(num)]]
        assert int(row[2]) + int(row[3]) == num
        assert (int(row[2]) > 0) == (i > 0)
    assert ["prompt", "tokens", *[str(sum(num_prompt))] * 3] in rows
    [cached] = [row for row in rows if row[:3] == ["from", "the", "cache"]]
    assert cached[3] == "0.0%" != cached[4] == cached[5]


def drawn(nodes: list[FakeNode], **options: int) -> list[str]:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(draw_tree(nodes, decode, title="tree", **options))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_tree_is_drawn_edge_by_edge_with_counts_and_holders() -> None:
    nodes = [
        node(0, "a system prompt", num_blocks=2, num_holders=3),
        node(1, "one", num_holders=1),
        node(2, "deep"),
        node(1, "two", num_holders=2),
        node(0, "else"),
    ]
    assert drawn(nodes) == [
        "tree",
        "├── 15 tokens  2 blocks  3 holding  a system prompt",
        "│   ├── 3 tokens  1 block  1 holding  one",
        "│   │   └── 4 tokens  1 block  free to evict  deep",
        "│   └── 3 tokens  1 block  2 holding  two",
        "└── 4 tokens  1 block  free to evict  else",
    ]


def test_siblings_beyond_the_limit_are_counted_with_all_below_them() -> None:
    nodes = [node(0, "a"), node(0, "bb"), node(1, "ccc"), node(0, "d")]
    assert drawn(nodes, max_children=1)[1:] == [
        "├── 1 token  1 block  free to evict  a",
        "└── … 2 more with 6 tokens",
    ]


def test_siblings_are_shown_from_where_they_differ() -> None:
    assert drawn([node(0, "#### 5 Who"), node(0, "#### 5 When")])[1:] == [
        "├── 10 tokens  1 block  free to evict  …o",
        "└── 11 tokens  1 block  free to evict  …en",
    ]


@pytest.mark.parametrize(
    ("siblings", "num_common"),
    [
        (["abc"], 0),
        (["abc", "abd"], 2),
        (["ab", "abc"], 2),
        (["x", "y"], 0),
        (["aa", "a", "ab"], 1),
    ],
)
def test_common_tokens_of_siblings(siblings: list[str], num_common: int) -> None:
    assert num_common_tokens([node(0, text).token_ids for text in siblings]) == num_common


@pytest.mark.parametrize("width", [5, 8, 13])
def test_a_snippet_fits_and_keeps_both_ends(width: int) -> None:
    short = snippet("first line\n  and  the last", width)
    assert len(short) == width
    assert short.startswith("fi") and short.endswith("t")
    assert snippet("a\n b", width) == "a b"
