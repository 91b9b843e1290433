"""`sapwood demo`: what a shared prefix is worth, on this machine, in under a minute.

Few-shot questions that begin with the same eight worked examples are answered with the tree, and
the first of them again without it. Every figure comes from the engine's outputs and counters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sapwood.runtime.sampling_params import SamplingParams
from sapwood.server.cli.pull import fetch
from sapwood.server.cli.tree_view import draw_tree, snippet

if TYPE_CHECKING:
    from sapwood.runtime.outputs import RequestOutput
    from sapwood.server.cli.tree_view import TokenIds, TreeNode

ANSWER_TOKENS = 32
NUM_COMPARED = 8  # as many questions run with the tree and without it
_POLL_SECONDS = 0.2
_SAMPLING = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)


class Info(Protocol):
    @property
    def model_name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def kernels(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def load_seconds(self) -> float: ...


class Stats(Protocol):
    @property
    def computed_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def num_running(self) -> int: ...


class TextTokenizer(Protocol):
    def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = True) -> str: ...


class DemoEngine(Protocol):
    """What the demo needs of `sapwood.Engine`."""

    @property
    def info(self) -> Info: ...
    @property
    def tokenizer(self) -> TextTokenizer: ...
    def generate(self, inputs: list[str], sampling: SamplingParams) -> list[RequestOutput]: ...
    def flush_cache(self) -> None: ...
    def stats(self) -> Stats: ...
    def tree(self) -> Sequence[TreeNode]: ...
    def close(self) -> None: ...


MakeEngine = Callable[[bool], AbstractContextManager[DemoEngine]]  # given: whether with the tree


def demo(
    model: Annotated[
        str, typer.Option(help="A known name, a folder, a .gguf file or a hub id.")
    ] = "smollm2",
    num_questions: Annotated[
        int, typer.Option(min=1, max=32, help="How many questions to answer with the tree.")
    ] = 32,
    baseline: Annotated[
        bool, typer.Option(help=f"Answer the first {NUM_COMPARED} again without the tree.")
    ] = True,
) -> None:
    """Answer questions that share a prefix, with the radix tree and without it."""
    console = Console()
    fetch(model, console)

    def make_engine(prefix_caching: bool) -> AbstractContextManager[DemoEngine]:
        with console.status(f"loading {model}"):
            from sapwood.runtime.engine import Engine  # imports torch, which takes a second

            return Engine(model, prefix_caching=prefix_caching)

    run_demo(console, make_engine, load_questions().prompts(num_questions), baseline=baseline)


@dataclass(frozen=True, slots=True)
class Questions:
    """Worked examples, and questions that have the same form up to the answer."""

    examples: tuple[tuple[str, str], ...]
    questions: tuple[str, ...]

    def prompts(self, num_questions: int) -> list[str]:
        """The first prompts; each is all the examples, then one question of its own."""
        shared = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in self.examples)
        return [f"{shared}Question: {q}\nAnswer:" for q in self.questions[:num_questions]]


def load_questions() -> Questions:
    """The questions that come with the package: GSM8K (Cobbe et al. 2021), MIT licence."""
    path = resources.files("sapwood.server.cli") / "data" / "gsm8k_demo.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    examples = tuple((each["question"], each["answer"]) for each in content["examples"])
    return Questions(examples, tuple(content["questions"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One batch of requests and what the engine told about it. Times in seconds."""

    title: str
    outputs: list[RequestOutput]
    seconds: float
    computed_tokens: int  # rows of all forward passes: prompt and answer tokens
    tree: Sequence[TreeNode]  # as it was when the most requests held it

    @property
    def prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.outputs)

    @property
    def generated_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def texts(self) -> list[str]:
        return [output.outputs[0].text for output in self.outputs]


def run_demo(
    console: Console, make_engine: MakeEngine, prompts: list[str], *, baseline: bool
) -> None:
    """Run all that is measured, then show it.

    With the baseline, the same few prompts run on an empty cache in both engines, before all of
    them run with the tree, again on an empty cache.
    """
    compared = prompts[:NUM_COMPARED]
    few: Run | None = None
    without: Run | None = None
    with make_engine(True) as engine:
        info = engine.info
        console.print(_headline(info))
        if baseline:
            few = measure(engine, f"{len(compared)} with the tree", compared, console)
        whole = measure(engine, f"{len(prompts)} with the tree", prompts, console)
        decode = engine.tokenizer.decode
    if baseline:
        with make_engine(False) as engine:
            without = measure(engine, f"{len(compared)} without the tree", compared, console)
    console.print(_request_table(whole, prompts))
    console.print(_drawing(whole, decode, info))
    console.print(_example(whole, prompts))
    console.print(_run_table([run for run in (without, few, whole) if run is not None]))
    if few is not None and without is not None:
        console.print(_verdict(without, few, whole))
    _print_next_steps(console, info)


def measure(engine: DemoEngine, title: str, prompts: list[str], console: Console) -> Run:
    """Answer `prompts` on an empty cache, after a warm-up that is not counted.

    Looks at the tree while it runs, in both kinds of engine, and keeps the fullest view of it.
    """
    engine.generate(["Hello"], SamplingParams(max_tokens=2, temperature=0.0))
    engine.flush_cache()
    before = engine.stats()

    def timed() -> tuple[list[RequestOutput], float]:
        started = time.perf_counter()
        outputs = engine.generate(prompts, _SAMPLING)
        return outputs, time.perf_counter() - started

    fullest: Sequence[TreeNode] = ()
    with ThreadPoolExecutor(1) as pool, console.status(title) as status:
        future = pool.submit(timed)
        try:
            while wait([future], timeout=_POLL_SECONDS).not_done:
                fullest = max(fullest, engine.tree(), key=_num_holders)
                now = engine.stats()
                generated = now.generated_tokens - before.generated_tokens
                status.update(f"{title}: {now.num_running} running, {generated:,} tokens generated")
            outputs, seconds = future.result()
        except BaseException:  # Ctrl-C too: the pool waits for its thread, so end what it waits for
            engine.close()
            raise
    return Run(
        title=title,
        outputs=outputs,
        seconds=seconds,
        computed_tokens=engine.stats().computed_tokens - before.computed_tokens,
        tree=fullest or engine.tree(),
    )


def _num_holders(tree: Sequence[TreeNode]) -> int:
    return sum(node.num_holders for node in tree)


def _headline(info: Info) -> Text:
    return Text.assemble(
        ("sapwood demo", "bold"),
        f"  {info.model_name} in {info.precision} on {info.device}, {info.kernels} kernels, "
        f"blocks of {info.block_size} tokens, loaded in {info.load_seconds:.1f} s",
    )


def _request_table(run: Run, prompts: list[str]) -> Table:
    title = f"{run.title}: tokens of each request, in the order sent"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("#", "prompt", "cached", "computed", "generated"):
        table.add_column(name, justify="right")
    table.add_column("question", no_wrap=True)
    for i, (output, prompt) in enumerate(zip(run.outputs, prompts, strict=True), 1):
        num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
        counts = (num_prompt, num_cached, num_prompt - num_cached, len(output.outputs[0].token_ids))
        table.add_row(str(i), *(f"{count:,}" for count in counts), snippet(_question(prompt), 34))
    totals = (run.prompt_tokens, run.cached_tokens, run.prompt_tokens - run.cached_tokens)
    cells = (f"{count:,}" for count in (*totals, run.generated_tokens))
    table.add_section()
    share = f"{_share(run.cached_tokens, run.prompt_tokens)} of the prompt tokens cached"
    table.add_row("", *cells, share, style="bold")
    return table


def _question(prompt: str) -> str:
    """The last question of a prompt, without the examples in front of it."""
    return prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")


def _drawing(run: Run, decode: Callable[[TokenIds], str], info: Info) -> Group:
    drawing = draw_tree(
        run.tree, decode, title=f"the tree of {info.model_name} while it ran", max_children=5
    )
    return Group("", drawing, "")


def _example(run: Run, prompts: list[str]) -> Panel:
    question, answer = _question(prompts[0]), run.texts[0].strip()
    text = Text.assemble((question, "dim"), "\n", (answer, "bold"), " …")
    return Panel(
        text,
        title="question 1 and what the model wrote (it is small: look at the speed, not the sums)",
        title_align="left",
    )


def _run_table(runs: list[Run]) -> Table:
    table = Table(
        title="all runs, each on an empty cache",
        caption="per second of wall time; a prompt token from the cache counts as taken in",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("questions")
    for run in runs:
        table.add_column(run.title, justify="right")
    measures: dict[str, Callable[[Run], str]] = {
        "prompt tokens": lambda run: f"{run.prompt_tokens:,}",
        "from the cache": lambda run: _share(run.cached_tokens, run.prompt_tokens),
        "rows computed": lambda run: f"{run.computed_tokens:,}",
        "generated tokens": lambda run: f"{run.generated_tokens:,}",
        "wall seconds": lambda run: f"{run.seconds:.2f}",
        "prompt tokens/s": lambda run: f"{run.prompt_tokens / run.seconds:,.0f}",
        "generated tokens/s": lambda run: f"{run.generated_tokens / run.seconds:,.1f}",
    }
    for name, measure in measures.items():
        table.add_row(name, *(measure(run) for run in runs))
    return table


def _verdict(without: Run, few: Run, whole: Run) -> Text:
    num = len(without.outputs)
    lines = [
        f"The same {num} questions: {without.seconds:.2f} s without the tree, {few.seconds:.2f} s "
        f"with it: {without.seconds / few.seconds:.1f} times as fast.",
        f"Generated tokens per second, {len(whole.outputs)} questions with the tree against {num} "
        f"without: {_output_rate(whole) / _output_rate(without):.1f} times as many.",
        _same_texts(f"those {num} with and without the tree", without.texts, few.texts),
        _same_texts(f"the first {num} of the {len(whole.outputs)}", without.texts, whole.texts),
    ]
    return Text("\n".join(lines))


def _output_rate(run: Run) -> float:
    return run.generated_tokens / run.seconds


def _same_texts(what: str, expected: list[str], texts: list[str]) -> str:
    """Says how many are equal; texts beyond those expected are not looked at."""
    pairs = list(zip(expected, texts, strict=False))
    num_same = sum(one == other for one, other in pairs)
    if num_same == len(pairs):
        return f"Answers of {what}: all {len(pairs)} the same, letter for letter."
    return (
        f"Answers of {what}: {num_same} of {len(pairs)} the same; sums are rounded in another "
        "order, which can tip a close choice between two tokens."
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _print_next_steps(console: Console, info: Info) -> None:
    """Plain lines, not cut to the width of the terminal: they are there to be copied."""
    messages = [{"role": "user", "content": "Hello"}]
    asked = {"messages": messages, "temperature": 0, "max_tokens": 64}
    body = json.dumps({"model": info.model_name} | asked)
    # As this command was called, so that it works without an activated environment.
    program = sys.argv[0] if Path(sys.argv[0]).name == "sapwood" else "sapwood"
    url = "http://127.0.0.1:8000/v1/chat/completions"
    console.print(Text("\nWhat to type next", style="bold"))
    for command, what in (
        (f"{program} chat", "talk to it"),
        (f"{program} serve", "then, from another terminal:"),
        (f"curl {url} -H 'Content-Type: application/json' -d '{body}'", ""),
    ):
        line = Text.assemble((f"  {command}", "bold cyan"), (f"  {what}", "dim"))
        console.print(line, soft_wrap=True)
