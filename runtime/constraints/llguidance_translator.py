"""Where constraints are translated for llguidance: here, or in another process what may take long.

Translating is Python's work (`llguidance_grammar.py`), for which all other threads of the process
wait, those that serve streams too. In a process it disturbs nobody, and what takes longer than its
deadline is killed (`bounded_process.py`). POSIX only; elsewhere everything is translated here.

Imports no torch.
"""

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from sapwood.runtime.constraints.bounded_process import BoundedProcess, Outcome, WorkError
from sapwood.runtime.constraints.compile_errors import grammar_error
from sapwood.runtime.constraints.llguidance_grammar import (
    LlguidanceText,
    SpecialTokens,
    llguidance_text,
)
from sapwood.runtime.constraints.messages import pack, unpack
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.errors import EngineClosedError

if TYPE_CHECKING:
    from sapwood.runtime.constraints.bounded_process_main import Task

logger = logging.getLogger(__name__)

# A process takes some 5 ms more than the work itself, which is up to 1 ms for 1,000 characters.
MAX_SHORT_CHARS = 4096
MEMORY_LIMIT = 2**28  # bytes; a schema of the greatest size takes a tenth of it


def _may_take_long(text: str) -> bool:
    """To tell the options of `oneOf` apart takes up to 0.3 s, however short they are. In JSON its
    name may be spelled with escapes."""
    return len(text) > MAX_SHORT_CHARS or "oneOf" in text or "\\u" in text


class Translator(Protocol):
    """Thread-safe."""

    def turn(self, spec: ConstraintSpec) -> AbstractContextManager[object]:
        """To be held while `spec` is translated, which may have to wait for others."""
        ...

    def translate(self, spec: ConstraintSpec, *, deadline: float) -> LlguidanceText:
        """As `llguidance_text`, within `deadline` seconds where that can be kept."""
        ...

    def close(self) -> None:
        """End what runs for it."""
        ...


class ThreadTranslator:
    """Translates on the thread of whoever asks. Looks at no deadline."""

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special

    def turn(self, spec: ConstraintSpec) -> AbstractContextManager[object]:
        return nullcontext()

    def translate(self, spec: ConstraintSpec, *, deadline: float) -> LlguidanceText:
        return llguidance_text(spec, self._special)

    def close(self) -> None:
        """Nothing runs for it."""


class ProcessTranslator:
    """Translates what may take long in a process, one after the other; until that has loaded what
    it needs (0.2 s), on the thread: no deadline is spent on waiting for it."""

    def __init__(self, special: SpecialTokens) -> None:
        """Starts the process, and does not wait for it. Raises OSError where none can be."""
        self._in_thread = ThreadTranslator(special)
        self._process = BoundedProcess(
            "sapwood.runtime.constraints.llguidance_translator:make_task",
            _special_to_bytes(special),
            memory_limit=MEMORY_LIMIT,
        )
        self._turn = threading.Lock()
        self._closed = False
        self._process.start()

    def wait_until_ready(self) -> None:
        """Until the process translates. Raises WorkError."""
        self._process.wait_until_ready()

    @property
    def process_id(self) -> int | None:
        """Of the process, if it runs."""
        return self._process.pid

    def turn(self, spec: ConstraintSpec) -> AbstractContextManager[object]:
        return self._turn if _may_take_long(spec.text) else nullcontext()

    def translate(self, spec: ConstraintSpec, *, deadline: float) -> LlguidanceText:
        """Raises WorkError where the process is at fault, and EngineClosedError after `close`."""
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one")
        if not _may_take_long(spec.text) or not self._process.is_ready():
            return self._in_thread.translate(spec, deadline=deadline)
        try:
            answer = self._process.run(_spec_to_bytes(spec), deadline=deadline)
        except WorkError as error:
            if self._closed:
                raise EngineClosedError("the engine is closed; make a new one") from error
            if error.outcome is Outcome.ENDED:
                raise
            raise grammar_error(error, "llguidance") from error
        return _text_of_bytes(answer.body)

    def close(self) -> None:
        self._closed = True
        self._process.close()


def make_translator(special: SpecialTokens) -> Translator:
    """With a process, where there can be one."""
    if not hasattr(os, "fork"):
        return ThreadTranslator(special)
    try:
        return ProcessTranslator(special)
    except OSError as error:
        logger.warning(
            "no process can be started, so large constraints disturb other answers: %s", error
        )
        return ThreadTranslator(special)


def make_task(setup: bytes) -> "Task":
    """From a `ConstraintSpec` to a `LlguidanceText`; `setup` is `SpecialTokens`."""
    import llguidance.gbnf_to_lark  # noqa: F401 (so that no fork has to)

    from sapwood.runtime.constraints import structural_tag  # noqa: F401 (likewise)

    special = _special_of_bytes(setup)

    def translate(request: bytes) -> bytes:
        return _text_to_bytes(llguidance_text(_spec_of_bytes(request), special))

    return translate


# ---- over the border. Texts are whatever Python holds in a string, halves of surrogates too.


def _special_to_bytes(special: SpecialTokens) -> bytes:
    header = {
        "texts": list(special.text_by_id.items()),
        "eos_token_ids": special.eos_token_ids,
    }
    return pack(header)


def _special_of_bytes(content: bytes) -> SpecialTokens:
    header, _ = unpack(content)
    return SpecialTokens(
        text_by_id=dict(header["texts"]), eos_token_ids=tuple(header["eos_token_ids"])
    )


def _spec_to_bytes(spec: ConstraintSpec) -> bytes:
    fields: Mapping[str, object] = spec.as_json()
    return pack({**fields, "text": ""}, spec.text.encode(errors="surrogatepass"))


def _spec_of_bytes(content: bytes) -> ConstraintSpec:
    fields, (text,) = unpack(content)
    return ConstraintSpec.from_json({**fields, "text": text.decode(errors="surrogatepass")})


def _text_to_bytes(text: LlguidanceText) -> bytes:
    header = {"special_token_ids": text.special_token_ids}
    return pack(header, text.grammar.encode(errors="surrogatepass"))


def _text_of_bytes(content: bytes) -> LlguidanceText:
    header, (grammar,) = unpack(content)
    return LlguidanceText(
        grammar=grammar.decode(errors="surrogatepass"),
        special_token_ids=tuple(header["special_token_ids"]),
    )
