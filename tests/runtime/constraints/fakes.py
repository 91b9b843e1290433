"""A backend whose compiles a test holds up, and matchers that allow everything."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from sapwood.runtime.config import ConstraintOptions
from sapwood.runtime.constraints.backends import Backends
from sapwood.runtime.constraints.bounded_process import Outcome, WorkError
from sapwood.runtime.constraints.compiler import ConstraintCompiler
from sapwood.runtime.constraints.interface import GrammarError, TokenMask, Vocabulary
from sapwood.runtime.constraints.spec import ConstraintSpec

NAMES = {
    "llguidance": "tests.runtime.constraints.fakes:FakeBackend",
    "missing": "tests.runtime.constraints.fakes:MissingBackend",
    "broken": "tests.runtime.constraints.fakes:BrokenBackend",
}
PATIENCE = 30.0  # seconds after which a test that hangs has failed


class Panic(BaseException):
    """What a backend written in Rust raises where it meets a bug of its own."""


@dataclass
class FakeMatcher:
    text: str
    is_complete: bool = False
    is_accepting: bool = True

    def fill_mask(self, mask: TokenMask) -> bool:
        return False

    def advance(self, token_id: int) -> bool:
        return True

    def forced_tokens(self) -> Sequence[int]:
        return ()

    def likely_tokens(self) -> list[int]:
        return []

    def rollback(self, num_tokens: int) -> None:
        pass

    def copy(self) -> "FakeMatcher":
        return FakeMatcher(self.text)

    def verdict(self, text: bytes) -> str | None:
        return None


class FakeGrammar:
    num_bytes = 1000

    def __init__(self, text: str) -> None:
        self.text = text

    def matcher(self) -> FakeMatcher:
        if "no copy" in self.text:
            raise Panic("cannot be copied")
        return FakeMatcher(self.text)


class FakeBackend:
    """Compiles at once; a text with "slow" in it only when it is released."""

    name = "fake"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.started: list[str] = []  # texts, in the order in which they were taken up
        self.closed = False
        self._released: dict[str, threading.Event] = defaultdict(threading.Event)
        self._release_all = False
        self._turn = threading.Lock()

    def turn(self, spec: ConstraintSpec) -> AbstractContextManager[object]:
        """Texts with "alone" in them are compiled one after the other."""
        return self._turn if "alone" in spec.text else nullcontext()

    def compile(self, spec: ConstraintSpec, *, deadline: float) -> FakeGrammar:
        self.started.append(spec.text)
        if "slow" in spec.text and not self._release_all:
            assert self._released[spec.text].wait(PATIENCE)
        if "wrong" in spec.text:
            raise GrammarError("a keyword is not enforced; leave it out", keyword="not")
        if "panic" in spec.text:
            raise Panic("index out of bounds")
        if "killed" in spec.text:
            raise WorkError(Outcome.ENDED, "the process that works on it was ended from outside")
        return FakeGrammar(spec.text)

    def release(self, text: str) -> None:
        self._released[text].set()

    def release_all(self) -> None:
        self._release_all = True
        for event in list(self._released.values()):
            event.set()

    def close(self) -> None:
        """Ends what is being compiled, as one that works in a process of its own."""
        self.closed = True
        self.release_all()


class MissingBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        import a_package_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401


class BrokenBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        raise ValueError("this vocabulary is not understood")


@dataclass
class VirtualClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def no_vocabulary() -> Vocabulary:
    return Vocabulary(
        token_bytes=(),
        special_token_ids=(),
        eos_token_ids=(),
        logits_size=0,
        encode=lambda text: [],
    )


def fake_compiler(
    clock: Callable[[], float] = time.monotonic,
    *,
    make_vocabulary: Callable[[], Vocabulary] = no_vocabulary,
    max_waiting: int = 1000,
    wait_seconds: float = 1e6,
    **options: int,
) -> tuple[ConstraintCompiler, Backends]:
    """A compiler over the backends of `NAMES`, to be closed."""
    backends = Backends(make_vocabulary, names=NAMES)
    given = ConstraintOptions(**{"constraint_deadline_ms": 5000, **options})
    compiler = ConstraintCompiler(
        backends, given, clock=clock, max_waiting=max_waiting, wait_seconds=wait_seconds
    )
    return compiler, backends


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread is about to do."""
    ends_at = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends_at, "it did not come"
        time.sleep(0.0005)
