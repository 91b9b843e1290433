"""Who waits for which request: brings requests to a core, and what it tells to who asked.

Callers of any kind share one core: each call has an inbox, and each inbox has a place where it is
read, a thread or an event loop. Knows no models and no texts.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Protocol

from sapwood.runtime.core import EngineCore
from sapwood.runtime.core_thread import CoreThread
from sapwood.runtime.errors import RequestError
from sapwood.runtime.request import Request, SequenceOutput


class Place(Hashable, Protocol):
    """Where inboxes are read. Equal places are the same one."""

    def run(self, deliver: Callable[[], None]) -> bool:
        """Have `deliver` called there; False if nobody is left there. Never blocks."""
        ...


class Inbox(Protocol):
    """Where the outputs of one call arrive."""

    @property
    def place(self) -> Place: ...

    def put(self, told: SequenceOutput | None) -> None:
        """Take something in, at the place; None says that nothing will follow."""
        ...


class Mailroom:
    """Runs a core on its thread, and knows the inbox of each request in flight. Thread-safe.

    What a step tells is brought to each place in one call, however many inboxes are there.
    """

    def __init__(self, core: EngineCore) -> None:
        self._inboxes: dict[str, Inbox] = {}  # by request id
        self._in_flight: dict[str, str] = {}  # request id by caller's id
        self._lock = threading.Lock()  # over the two
        self.core = CoreThread(core, self._deliver)

    def request_id(self, caller_id: str) -> str | None:
        """The request in flight that its caller calls so, compared exactly."""
        return self._in_flight.get(caller_id)

    def submit(self, requests: Sequence[Request], inbox: Inbox) -> None:
        """Hand requests to the core, their outputs to `inbox`.

        Raises RequestError where a caller's id is in use, EngineClosedError after the core's end.
        """
        with self._lock:
            in_use = dict(self._in_flight)
            for request in requests:
                if request.caller_id in in_use:
                    raise RequestError(
                        f"request id {request.caller_id!r} is in use; wait for it or take another",
                        param="request_id",
                    )
                in_use[request.caller_id] = request.request_id
            self._in_flight = in_use
            for request in requests:
                self._inboxes[request.request_id] = inbox
        try:
            self.core.submit(*requests)
        except BaseException:
            self.withdraw(requests, ())
            raise

    def withdraw(self, requests: Sequence[Request], unfinished: Iterable[str]) -> None:
        """Expect nothing more of these requests, and end those that are unfinished."""
        for request_id in unfinished:
            self.core.abort(request_id)
        with self._lock:
            for request in requests:
                self._inboxes.pop(request.request_id, None)
                self._in_flight.pop(request.caller_id, None)

    def _abandon(self, request_id: str) -> None:
        """End a request whose caller is gone without having withdrawn it."""
        self.core.abort(request_id)
        with self._lock:
            self._inboxes.pop(request_id, None)
            for caller_id in [c for c, r in self._in_flight.items() if r == request_id]:
                del self._in_flight[caller_id]

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        """Pass on what a step told; an empty list says that nothing will follow."""
        told: list[tuple[Inbox, SequenceOutput | None]]
        if outputs:
            found = ((self._inboxes.get(output.request_id), output) for output in outputs)
            told = [(inbox, output) for inbox, output in found if inbox is not None]
        else:
            told = [(inbox, None) for inbox in set(self._inboxes.values())]
        by_place: dict[Place, list[tuple[Inbox, SequenceOutput | None]]] = {}
        for inbox, output in told:
            by_place.setdefault(inbox.place, []).append((inbox, output))
        for place, letters in by_place.items():
            if not place.run(partial(_put_all, letters)):
                for _, output in letters:
                    if output is not None:
                        self._abandon(output.request_id)


def _put_all(letters: Sequence[tuple[Inbox, SequenceOutput | None]]) -> None:
    for inbox, told in letters:
        inbox.put(told)
