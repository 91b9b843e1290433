"""Record what a backend answers, and answer from the record: tests of programs without a model.

A recording is a file of JSON lines. The first tells of the backend, each other of one call: what
was asked, and what came back. A call is found again by what it asks, hints left out, as they change
no answer. Equal calls are told apart by their order: the n-th to begin gets the n-th answer, so a
program that runs its forks at the same time is answered the same in every run.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

from sapwood.frontend_lang.backends.interface import (
    Answer,
    Backend,
    Call,
    Encoder,
    Piece,
    Prompt,
    RoleText,
    Score,
    TokenIds,
)
from sapwood.frontend_lang.process import as_backend
from sapwood.runtime import errors
from sapwood.runtime.errors import RequestError, SapwoodError
from sapwood.runtime.hints import Hints

VERSION = 1
SHOWN_CHARACTERS = 40  # of a value that differs, from a little before the difference

Json = Any
T = TypeVar("T")


class Mode(StrEnum):
    """Where answers come from."""

    AUTO = "auto"  # from the file, and where it has none from the backend, which is recorded
    RECORD = "record"  # from the backend; the file begins anew
    REPLAY = "replay"  # from the file


class Recording:
    """A backend that remembers another one, or stands in for it.

    `backend` may be None to replay. Everything that a program asks of it is recorded, errors too;
    a call that was cancelled is not. Answers come back as JSON has them, also while they are
    recorded: tuples in `meta` are lists.
    """

    def __init__(self, backend: object, path: str | os.PathLike[str], mode: str = "auto") -> None:
        """`backend`: whatever a program runs on, or None.

        Raises RequestError for an unknown mode, a file that is missing or no recording, and for no
        backend where one is needed.
        """
        self._backend = None if backend is None else as_backend(backend)
        self._mode = _mode(mode)
        if self._mode is Mode.RECORD and self._backend is None:
            raise RequestError("to record, Recording needs a backend", param="backend")
        self._tape = Tape.open(Path(path), self._mode, self._backend)
        about = self._tape.about
        self.name = f"{about['name']} (recorded)"
        self.chat_only = bool(about["chat_only"])
        self.encoder: Encoder | None = _RecordedEncoder(self) if about["has_encoder"] else None

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        async def ask(backend: Backend) -> Json:
            return [asdict(answer) for answer in await backend.generate(prompt, call)]

        told = await self.answered("generate", _asked(prompt, call), ask)
        return [_answer(answer) for answer in told]

    async def stream(self, prompt: Prompt, call: Call) -> AsyncIterator[Answer]:
        entry = self._tape.begin("stream", _asked(prompt, call))
        if entry.is_recorded:
            for piece in entry.pieces:
                yield _answer(piece)
            entry.result()
            return
        pieces: list[Json] = []
        try:
            stream = cast(Any, self._source(entry).stream(prompt, call))
            async with aclosing(stream):
                async for piece in stream:
                    pieces.append(asdict(piece))
                    yield _answer(_as_json(pieces[-1]))
        except SapwoodError as error:
            entry.write_error(error, pieces)
            raise
        entry.write(pieces)

    async def score(
        self, prompt: Prompt, continuations: Sequence[TokenIds | str], hints: Hints
    ) -> list[Score]:
        async def ask(backend: Backend) -> Json:
            scores = await backend.score(prompt, continuations, hints)
            return [asdict(score) for score in scores]

        asked = {"prompt": asdict(prompt), "continuations": list(continuations)}
        told = await self.answered("score", asked, ask)
        return [_score(score) for score in told]

    async def flush_cache(self) -> None:
        """Of the backend; a record has no cache."""
        if self._backend is not None and self._mode is not Mode.REPLAY:
            await self._backend.flush_cache()

    async def server_info(self) -> Mapping[str, Any]:
        async def ask(backend: Backend) -> Json:
            return dict(await backend.server_info())

        return cast(Mapping[str, Any], await self.answered("server_info", {}, ask))

    async def aclose(self) -> None:
        if self._backend is not None:
            await self._backend.aclose()

    async def answered(
        self,
        method: str,
        asked: Json,
        ask: Callable[[Backend], Awaitable[Json]],
        *,
        is_pure: bool = False,
    ) -> Json:
        """What `ask` of the backend tells, or told when it was recorded. `is_pure`: equal calls
        have equal answers, and one is kept. Raises SapwoodError."""
        entry = self._tape.begin(method, asked, is_pure=is_pure)
        if entry.is_recorded:
            return entry.result()
        try:
            result = await ask(self._source(entry))
        except SapwoodError as error:
            entry.write_error(error)
            raise
        return entry.write(result)

    def _source(self, entry: "Entry") -> Backend:
        """The backend, where it may be asked. Raises RequestError."""
        if self._backend is None or self._mode is Mode.REPLAY:
            raise entry.missing()
        return self._backend


@dataclass(frozen=True, slots=True)
class _RecordedEncoder:
    """The tokenizer and chat template of a recorded backend."""

    recording: Recording

    async def encode(self, pieces: Sequence[Piece], *, at_start: bool) -> TokenIds:
        async def ask(backend: Backend) -> Json:
            assert backend.encoder is not None
            return list(await backend.encoder.encode(pieces, at_start=at_start))

        asked = {"pieces": [asdict(piece) for piece in pieces], "at_start": at_start}
        return tuple(await self.recording.answered("encode", asked, ask, is_pure=True))

    async def role_text(self, roles: tuple[str, ...]) -> RoleText:
        async def ask(backend: Backend) -> Json:
            assert backend.encoder is not None
            return asdict(await backend.encoder.role_text(roles))

        told = await self.recording.answered("role_text", {"roles": list(roles)}, ask, is_pure=True)
        return RoleText(**told)


class Tape:
    """The file: what it has, and what is added to it.

    A call's key is its method and what it asks, and the number of the equal ones that began before
    it in this run. Each line is written at once, whole.
    """

    def __init__(self, path: Path, about: Json, lines: Sequence[Json]) -> None:
        self.about = about
        self._path = path
        self._lines = {
            (_key(line["method"], line["asked"]), line["number"]): line for line in lines
        }
        self._begun: Counter[str] = Counter()

    @classmethod
    def open(cls, path: Path, mode: Mode, backend: Backend | None) -> "Tape":
        """The recording at `path`, begun where there is none. Raises RequestError."""
        if mode is Mode.RECORD or (mode is Mode.AUTO and not path.exists()):
            if backend is None:
                raise RequestError(f"there is no recording {path}, and no backend to record")
            about = {
                "version": VERSION,
                "name": backend.name,
                "chat_only": backend.chat_only,
                "has_encoder": backend.encoder is not None,
            }
            _write_line(path, {"recording": about}, mode="w")
            return cls(path, about, ())
        return cls(path, *_read(path))

    def begin(self, method: str, asked: Json, *, is_pure: bool = False) -> "Entry":
        """A call begins; costs a hash of what it asks."""
        plain = _as_json(asked)
        key = _key(method, plain)
        number = 0 if is_pure else self._begun[key]
        self._begun[key] += 1
        return Entry(self, method, plain, key, number)

    def line(self, entry: "Entry") -> Json | None:
        return self._lines.get((entry.key, entry.number))

    def write(self, entry: "Entry", outcome: Json) -> Json:
        """Add a line; it as JSON has it."""
        line = {"method": entry.method, "number": entry.number, "asked": entry.asked, **outcome}
        read = _as_json(line)
        self._lines[entry.key, entry.number] = read
        _write_line(self._path, read, mode="a")
        return read

    def missing(self, entry: "Entry") -> RequestError:
        """What to say of a call that is not there."""
        same = [line for line in self._lines.values() if line["method"] == entry.method]
        equal = [line for line in same if line["asked"] == entry.asked]
        if equal:
            what = f"of its equals {len(equal)} were recorded, this is number {entry.number + 1}"
        elif same:
            what = f"the nearest call there {_nearest(entry.asked, same)}"
        else:
            what = f"it has no call of {entry.method} at all"
        return RequestError(
            f"{self._path} has no answer to this call of {entry.method}: {what}; record again with "
            'mode="record", or add what is missing with mode="auto" and a backend'
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A call, as JSON has it, and its place on the tape. `number`: of its equals, from 0."""

    tape: Tape
    method: str
    asked: Json
    key: str
    number: int

    @property
    def is_recorded(self) -> bool:
        return self.tape.line(self) is not None

    def result(self) -> Json:
        """What was recorded. Raises SapwoodError where that is an error."""
        line = self.tape.line(self)
        if line is None:
            raise self.missing()
        if "error" in line:
            raise _error(line["error"])
        return line["result"]

    def write(self, result: Json) -> Json:
        """Record what came back; it as JSON has it."""
        return self.tape.write(self, {"result": result})["result"]

    @property
    def pieces(self) -> Json:
        """What a stream had said, also before an error."""
        return (self.tape.line(self) or {}).get("result") or []

    def write_error(self, error: SapwoodError, pieces: Json = None) -> None:
        self.tape.write(self, {"result": pieces, "error": _error_as_json(error)})

    def missing(self) -> RequestError:
        return self.tape.missing(self)


def _mode(mode: str) -> Mode:
    try:
        return Mode(mode)
    except ValueError:
        known = ", ".join(Mode)
        raise RequestError(f"mode is one of {known}, not {mode!r}", param="mode") from None


def _asked(prompt: Prompt, call: Call) -> Json:
    options = {name: value for name, value in call.options.items() if value is not None}
    return {
        "prompt": asdict(prompt),
        "options": options,
        "constraint": None if call.constraint is None else call.constraint.as_json(),
        "separate_reasoning": call.separate_reasoning,
        "reasoning_type": call.reasoning_type,
    }


def _key(method: str, asked: Json) -> str:
    text = json.dumps([method, asked], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(value: Json) -> Json:
    """A value as it comes back from the file. Raises RequestError for what JSON cannot say."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise RequestError(f"what is no JSON cannot be recorded: {error}") from error


def _answer(told: Mapping[str, Any]) -> Answer:
    return Answer(**{**told, "token_ids": _token_ids(told["token_ids"])})


def _score(told: Mapping[str, Any]) -> Score:
    ids, logprobs = _token_ids(told["token_ids"]), tuple(told["logprobs"])
    return Score(**{**told, "logprobs": logprobs, "token_ids": ids})


def _token_ids(told: Sequence[int] | None) -> TokenIds | None:
    return None if told is None else tuple(told)


def _error_as_json(error: SapwoodError) -> Json:
    fields = {
        name: getattr(error, name)
        for name in ("param", "code")
        if getattr(error, name, None) is not None
    }
    return {"type": type(error).__name__, "message": str(error), **fields}


def _error(told: Mapping[str, Any]) -> SapwoodError:
    """The error as it was: its class, or the nearest that there is."""
    kind = getattr(errors, told["type"], SapwoodError)
    if kind is errors.ContextLengthError:
        return errors.ContextLengthError(told["message"], param=told.get("param"))
    if issubclass(kind, RequestError):
        return RequestError(told["message"], param=told.get("param"), code=told.get("code"))
    return cast(SapwoodError, kind(told["message"]))


def _read(path: Path) -> tuple[Json, list[Json]]:
    """What the first line says, and the others. Raises RequestError."""
    try:
        first, *lines = path.read_text().splitlines()
        about = json.loads(first)["recording"]
        version, calls = about["version"], [json.loads(line) for line in lines]
    except OSError as error:
        raise RequestError(f"the recording {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is no recording ({error}); record again") from error
    if version != VERSION:
        raise RequestError(f"{path} has version {version}, this reads {VERSION}; record again")
    return about, calls


def _write_line(path: Path, line: Json, *, mode: str) -> None:
    with path.open(mode) as file:
        file.write(json.dumps(line) + "\n")


def _nearest(asked: Json, lines: Sequence[Json]) -> str:
    """How the call that differs least differs."""
    wanted = _leaves(asked)
    told = min(
        (_leaves(line["asked"]) for line in lines),
        key=lambda leaves: _distance(wanted, leaves),
    )
    places = [place for place in {**wanted, **told} if wanted.get(place) != told.get(place)]
    return "; ".join(
        f"differs in {place}: {_differ(told.get(place), wanted.get(place))}" for place in places[:3]
    )


def _distance(wanted: Mapping[str, Json], told: Mapping[str, Json]) -> tuple[int, int]:
    """In how many places two calls differ, and then how early their texts do."""
    places = {**wanted, **told}
    num_different = sum(wanted.get(place) != told.get(place) for place in places)
    text, other = str(wanted.get("prompt.text")), str(told.get("prompt.text"))
    return num_different, -len(os.path.commonprefix([text, other]))


def _differ(told: Json, wanted: Json) -> str:
    """Both values, texts from where they part."""
    if not isinstance(told, str) or not isinstance(wanted, str):
        return f"it has {told!r}, this call {wanted!r}"
    at = len(os.path.commonprefix([told, wanted]))
    begin = max(0, at - SHOWN_CHARACTERS // 2)
    shown = slice(begin, begin + SHOWN_CHARACTERS)
    return f"from character {at} it has {told[shown]!r}, this call {wanted[shown]!r}"


def _leaves(value: Json, place: str = "") -> dict[str, Json]:
    """The plain values in a JSON value, by where they are. Token ids are one value."""
    if isinstance(value, dict):
        return _joined({f"{place}.{key}".lstrip("."): item for key, item in value.items()})
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return _joined({f"{place}[{i}]": item for i, item in enumerate(value)})
    return {place: value}


def _joined(values: Mapping[str, Json]) -> dict[str, Json]:
    leaves: dict[str, Json] = {}
    for place, value in values.items():
        leaves |= _leaves(value, place)
    return leaves
