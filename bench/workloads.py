"""What the benchmarks ask an engine: token ids and lengths, the same for every engine.

Knows no engine. Prompts are pieces of real English (the help topics of Python's own
documentation) and multiple-choice questions. A workload is a function of its name and a
repetition number: every repetition has fresh text, so that what should be cold is cold.
Repetition 0 is for warm-up and is never counted.

Scripts of this folder say `from workloads import ...`.
"""

import ast
import csv
import io
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any, Protocol

TokenIds = tuple[int, ...]
Message = Mapping[str, str]  # "role" and "content"

LETTERS = "ABCD"
MMLU_FOLDER = Path(__file__).parent / "data" / "mmlu_redux"
MMLU_SUBJECTS = ("astronomy", "high_school_computer_science", "jurisprudence")
NUM_SHOTS = 5


class Tokenizer(Protocol):
    """What is asked of a model's tokenizer; Sapwood's has it."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Iterable[int]: ...

    def encode_chat(self, messages: Sequence[Message]) -> Iterable[int]:
        """A conversation in the model's own format, up to where its next answer begins."""
        ...


class PromptStyle(StrEnum):
    """How a model is asked a question after worked ones."""

    CHAT = "chat"  # each worked one is an earlier turn, in the model's chat format
    TEXT = "text"  # all is one text that the model continues


class Kind(StrEnum):
    """What is timed."""

    DECODE = "decode"  # one request: tokens per second from its first token to its last
    PREFILL = "prefill"  # one request: prompt tokens per second until its first token
    FIRST_TOKEN = "first_token"  # seconds until the first token, median over the requests
    BATCH = "batch"  # all requests submitted at once: seconds until the last is done
    CHATS = "chats"  # conversations side by side, each turn sent when the last answer is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One row of the catalogue. `unit` is tok/s (more is better) or s (less is better)."""

    name: str
    title: str
    kind: Kind
    unit: str

    @property
    def more_is_better(self) -> bool:
        return self.unit == "tok/s"


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        name: Workload(name=name, title=title, kind=kind, unit=unit)
        for name, title, kind, unit in (
            ("a", "1 request, 32 in, 128 out: decode", Kind.DECODE, "tok/s"),
            ("b", "1 cold prompt of 1,024: prefill", Kind.PREFILL, "tok/s"),
            ("c", "32 requests, cold shared prefix 1,024, own 64, out 32", Kind.BATCH, "s"),
            ("cw", "as c, the prefix warm", Kind.BATCH, "s"),
            ("d", "16 requests, nothing shared, own 256, out 64", Kind.BATCH, "s"),
            ("e", "repeated prompt of 1,024: first token", Kind.FIRST_TOKEN, "s"),
            (
                "t",
                "tree 512, 4 x 256, 8 requests in each, own 64, out 32",
                Kind.BATCH,
                "s",
            ),
            (
                "m",
                "100 MMLU questions in the model's chat format, 5-shot, 3 subjects shuffled, out 1",
                Kind.BATCH,
                "s",
            ),
            ("s", "8 chats of 4 turns, 60 in, 60 out, side by side", Kind.CHATS, "s"),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how many tokens to generate, greedily and past any end token."""

    prompt_ids: TokenIds
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One repetition of a workload, as plain data.

    `before` runs one by one before the clock starts. `primer` holds the shared prefixes, each
    after the ones it extends: a client that knows its engine may send them first, within the
    time. In CHATS `turns[i]` are the tokens that chat i adds, and `max_tokens` what is generated
    after each; `requests` is empty there.
    """

    workload: str
    kind: Kind
    repetition: int
    before: tuple[Request, ...] = ()
    requests: tuple[Request, ...] = ()
    primer: tuple[TokenIds, ...] = ()
    turns: tuple[tuple[TokenIds, ...], ...] = ()
    max_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests, shared ones counted each time; answers that come back too."""
        chats = sum(
            sum(len(turn) for turn in chat[: k + 1]) + k * self.max_tokens
            for chat in self.turns
            for k in range(len(chat))
        )
        return chats + sum(len(request.prompt_ids) for request in self.requests)

    @property
    def num_generated_tokens(self) -> int:
        chats = sum(len(chat) * self.max_tokens for chat in self.turns)
        return chats + sum(request.max_tokens for request in self.requests)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MmluQuestion:
    """A 5-shot prompt; `letter_ids` are the tokens of the letters as its worked answers have them.

    In text the prompt ends in "Answer:" and the letters are " A" to " D". In a chat that line ends
    the last message, the answer's opening follows, and the letters are "A" to "D".
    """

    subject: str
    prompt_ids: TokenIds
    answer: str
    letter_ids: tuple[int, int, int, int]


class WorkloadBuilder:
    """Builds the jobs of all workloads with one tokenizer.

    `scale` shrinks every count and length, for trying things out: figures of different scales have
    nothing to do with each other. `build` is a pure function of its arguments.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, data: Path = MMLU_FOLDER, scale: float = 1.0
    ) -> None:
        if not 0 < scale <= 1:
            raise ValueError(f"scale is {scale}; it must be above 0 and at most 1")
        self.tokenizer = tokenizer
        self.data = data
        self._scale = scale
        self._text = _english(tokenizer)
        # Every workload has a stretch of the text of its own within a repetition's stretch.
        self._starts: dict[str, int] = {}
        position = 0
        for name, num_tokens in _NUM_TEXT_TOKENS.items():
            self._starts[name] = position
            position += num_tokens
        self._repetition_len = position

    def build(self, name: str, repetition: int) -> Job:
        """The job of one repetition of the workload called `name`."""
        if name not in WORKLOADS:
            raise ValueError(f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}")
        build = getattr(self, f"_build_{name}")
        job: Job = build(repetition)
        return job

    def mmlu(self, repetition: int) -> list[MmluQuestion]:
        """The questions behind repetition `repetition` of workload m, in its order."""
        return mmlu_questions(
            self.tokenizer,
            self.data,
            style=PromptStyle.CHAT,
            count=self._size(100),
            set_number=repetition,
        )

    def _build_a(self, repetition: int) -> Job:
        text = self._reader("a", repetition)
        request = Request(text.take(self._size(32)), self._size(128))
        return _job("a", repetition, requests=(request,))

    def _build_b(self, repetition: int) -> Job:
        text = self._reader("b", repetition)
        return _job("b", repetition, requests=(Request(text.take(self._size(1024)), 1),))

    def _build_c(self, repetition: int) -> Job:
        prefix, requests = self._fan_out("c", repetition)
        return _job("c", repetition, requests=requests, primer=(prefix,))

    def _build_cw(self, repetition: int) -> Job:
        prefix, requests = self._fan_out("cw", repetition)
        return _job("cw", repetition, before=(Request(prefix, 1),), requests=requests)

    def _build_d(self, repetition: int) -> Job:
        text = self._reader("d", repetition)
        requests = tuple(
            Request(text.take(self._size(256)), self._size(64)) for _ in range(self._size(16))
        )
        return _job("d", repetition, requests=requests)

    def _build_e(self, repetition: int) -> Job:
        text = self._reader("e", repetition)
        request = Request(text.take(self._size(1024)), 1)
        return _job("e", repetition, before=(request,), requests=(request,) * 5)

    def _build_t(self, repetition: int) -> Job:
        text = self._reader("t", repetition)
        root = text.take(self._size(512))
        groups = [root + text.take(self._size(256)) for _ in range(self._size(4))]
        # Round robin over the groups, as independent callers would mix.
        requests = tuple(
            Request(group + text.take(self._size(64)), self._size(32))
            for _ in range(self._size(8))
            for group in groups
        )
        return _job("t", repetition, requests=requests, primer=(root, *groups))

    def _build_m(self, repetition: int) -> Job:
        requests = tuple(Request(question.prompt_ids, 1) for question in self.mmlu(repetition))
        return _job("m", repetition, requests=requests)

    def _build_s(self, repetition: int) -> Job:
        text = self._reader("s", repetition)
        num_chats, num_turns, turn_len = self._size(8), self._size(4), self._size(60)
        turns = tuple(
            tuple(text.take(turn_len) for _ in range(num_turns)) for _ in range(num_chats)
        )
        return _job("s", repetition, turns=turns, max_tokens=turn_len)

    def _fan_out(self, name: str, repetition: int) -> tuple[TokenIds, tuple[Request, ...]]:
        text = self._reader(name, repetition)
        prefix = text.take(self._size(1024))
        requests = tuple(
            Request(prefix + text.take(self._size(64)), self._size(32))
            for _ in range(self._size(32))
        )
        return prefix, requests

    def _reader(self, name: str, repetition: int) -> "_Reader":
        start = repetition * self._repetition_len + self._starts[name]
        return _Reader(self._text, start)

    def _size(self, full: int) -> int:
        return max(2, round(full * self._scale))


_NUM_TEXT_TOKENS: Mapping[str, int] = MappingProxyType(
    {
        "a": 32,
        "b": 1024,
        "c": 1024 + 32 * 64,
        "cw": 1024 + 32 * 64,
        "d": 16 * 256,
        "e": 1024,
        "t": 512 + 4 * 256 + 32 * 64,
        "s": 8 * 4 * 60,
    }
)
"""Tokens of English that one repetition of a workload needs at full scale."""


class _Reader:
    """Takes piece after piece of a text that is read in a circle.

    A later lap starts one token further on, so that it cuts the text elsewhere.
    """

    def __init__(self, text: TokenIds, start: int) -> None:
        self._text = text
        self._position = start

    def take(self, num_tokens: int) -> TokenIds:
        lap, start = divmod(self._position, len(self._text))
        self._position += num_tokens
        start += lap
        return tuple(self._text[(start + i) % len(self._text)] for i in range(num_tokens))


def _job(name: str, repetition: int, **fields: Any) -> Job:
    return Job(workload=name, kind=WORKLOADS[name].kind, repetition=repetition, **fields)


def _english(tokenizer: Tokenizer) -> TokenIds:
    """About 110,000 tokens; the topics in the order of their names."""
    return _encode(tokenizer, "\n\n".join(topics[name] for name in sorted(topics)))


def mmlu_questions(
    tokenizer: Tokenizer,
    data: Path = MMLU_FOLDER,
    *,
    style: PromptStyle = PromptStyle.CHAT,
    count: int = 100,
    set_number: int = 0,
) -> list[MmluQuestion]:
    """`count` questions of three subjects after five worked ones each, in a fixed random order.

    `data` is a folder with MMLU-Redux's `mmlu_<subject>.csv`; rows that its reviewers found
    faulty are left out, the first five of the rest are the examples. Both styles ask the same
    questions in the same order; chats are those of lm-evaluation-harness with
    `--apply_chat_template --fewshot_as_multiturn`. Prompts of a subject begin with the same token
    ids: those of the worked questions. Another `set_number` above 0 puts other words in front, so
    that the same questions can be asked again of a cold cache; what a chat template puts in front
    of them, such as a default system message, is the same in every set and may be warm. Raises
    ValueError for too few rows and for letters that take more than one token.
    """
    letter_ids = tuple(
        _single_token(tokenizer, letter if style is PromptStyle.CHAT else f" {letter}")
        for letter in LETTERS
    )
    questions = []
    for index, subject in enumerate(MMLU_SUBJECTS):
        rows = _mmlu_rows(data / f"mmlu_{subject}.csv")
        wanted = count // len(MMLU_SUBJECTS) + (index < count % len(MMLU_SUBJECTS))
        if len(rows) < NUM_SHOTS + wanted:
            raise ValueError(
                f"{subject} has {len(rows)} sound rows, {NUM_SHOTS + wanted} are needed; "
                "ask for fewer questions"
            )
        head = f"Set {set_number}. " if set_number else ""
        head += (
            "The following are multiple choice questions (with answers) about "
            f"{subject.replace('_', ' ')}.\n\n"
        )
        asked = rows[NUM_SHOTS : NUM_SHOTS + wanted]
        make_prompts = _chat_prompts if style is PromptStyle.CHAT else _text_prompts
        prompts = make_prompts(tokenizer, head, rows[:NUM_SHOTS], asked)
        questions += [
            MmluQuestion(
                subject=subject,
                prompt_ids=prompt_ids,
                answer=row.answer,
                letter_ids=letter_ids,  # type: ignore[arg-type]  # four letters
            )
            for row, prompt_ids in zip(asked, prompts, strict=True)
        ]
    random.Random(7).shuffle(questions)
    return questions


def _chat_prompts(
    tokenizer: Tokenizer, head: str, shots: Sequence["_MmluRow"], asked: Sequence["_MmluRow"]
) -> list[TokenIds]:
    """A conversation for each row asked, `head` in front of its first message.

    Encoded as a whole, as a chat endpoint does: the control tokens before the last message keep it
    from merging with the turns that all share.
    """
    turns: list[Message] = []
    for row in shots:
        turns.append({"role": "user", "content": head + row.text})
        turns.append({"role": "assistant", "content": row.answer})
        head = ""
    chats = [[*turns, {"role": "user", "content": row.text}] for row in asked]
    return [tuple(int(token_id) for token_id in tokenizer.encode_chat(chat)) for chat in chats]


def _text_prompts(
    tokenizer: Tokenizer, head: str, shots: Sequence["_MmluRow"], asked: Sequence["_MmluRow"]
) -> list[TokenIds]:
    """A text for each row asked, to be continued by a space and a letter."""
    # Encoded apart from the question, so that no merge across the border differs by question.
    worked = "".join(f"{row.text} {row.answer}\n\n" for row in shots)
    prefix = _encode(tokenizer, head + worked)
    return [prefix + _encode(tokenizer, row.text) for row in asked]


@dataclass(frozen=True, slots=True)
class _MmluRow:
    text: str  # up to and with "Answer:"
    answer: str


def _mmlu_rows(path: Path) -> list[_MmluRow]:
    # Some of the files are not UTF-8, and some are separated by semicolons.
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("mac-roman")
    delimiter = ";" if text.startswith("question;") else ","
    rows = []
    for row in csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter):
        if row["error_type"].strip().lower() != "ok":
            continue
        choices: Sequence[str] = ast.literal_eval(row["choices"])
        lines = [row["question"].strip()]
        lines += [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
        rows.append(_MmluRow("\n".join([*lines, "Answer:"]), LETTERS[int(row["answer"])]))
    return rows


def _encode(tokenizer: Tokenizer, text: str) -> TokenIds:
    return tuple(int(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False))


def _single_token(tokenizer: Tokenizer, text: str) -> int:
    token_ids = _encode(tokenizer, text)
    if len(token_ids) != 1:
        raise ValueError(f"{text!r} takes {len(token_ids)} tokens of this tokenizer, not one")
    return token_ids[0]
