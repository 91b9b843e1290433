"""Runs an engine core on a thread of its own.

Requests go in through one queue and outputs come out through another, as plain values; nobody
else touches the core. A process of its own would speak the same messages.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from sapwood.radix import NodeView
from sapwood.runtime.core import EngineCore, EngineStats
from sapwood.runtime.errors import EngineClosedError
from sapwood.runtime.request import Request, SequenceOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _FlushCache:
    reply: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Tree:
    reply: "Future[list[NodeView]]"


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message = _Submit | _Abort | _FlushCache | _Tree | _Stop


class CoreThread:
    """The thread of a core, and the two queues. Thread-safe.

    `deliver` is called on a second thread with what each step has to tell, so that no caller's
    work is ever in the way of a step.
    """

    def __init__(self, core: EngineCore, deliver: Callable[[list[SequenceOutput]], None]) -> None:
        self._deliver = deliver
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._outbox: SimpleQueue[list[SequenceOutput] | None] = SimpleQueue()
        self._stats = core.stats()
        self._closed = False
        self._process_id = os.getpid()
        self._lock = threading.Lock()  # orders submissions and the close
        self._threads = [
            # Only its thread holds the core, so that the model's memory goes when the thread ends.
            threading.Thread(target=self._run_core, args=(core,), name="sapwood-core", daemon=True),
            threading.Thread(target=self._run_delivery, name="sapwood-delivery", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    @property
    def is_alive(self) -> bool:
        return not self._closed and all(thread.is_alive() for thread in self._threads)

    def check_process(self) -> None:
        """Raises EngineClosedError in a forked process, which has no threads of its parent."""
        if os.getpid() != self._process_id:
            raise EngineClosedError(
                "the engine's threads are in the process that made it, and this one was forked "
                "from that; make an engine in each process, after the fork"
            )

    def submit(self, *requests: Request) -> None:
        """Hand requests over, in this order and together: one plan sees all of them."""
        self._send(*(_Submit(request) for request in requests))

    def abort(self, request_id: str) -> None:
        """End a request before the next step. Nothing happens if it has ended already."""
        with suppress(EngineClosedError):  # which ends all of them
            self._send(_Abort(request_id))

    def flush_cache(self) -> "Future[None]":
        reply: Future[None] = Future()
        self._send(_FlushCache(reply))
        return reply

    def tree(self) -> "Future[list[NodeView]]":
        """The radix tree between two steps, depth first."""
        reply: Future[list[NodeView]] = Future()
        self._send(_Tree(reply))
        return reply

    def close(self) -> None:
        """Stop after the step in progress and wait for both threads. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(_Stop())
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _send(self, *messages: _Message) -> None:
        self.check_process()  # before the lock, which another thread may have held at the fork
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed; make a new one")
            for message in messages:
                self._inbox.put(message)

    def _run_core(self, core: EngineCore) -> None:
        try:
            while self._take_messages(core):
                outputs = core.step()
                self._stats = core.stats()
                if outputs:
                    self._outbox.put(outputs)
        except Exception:
            logger.exception("the core's thread ends")
            raise
        finally:
            self._closed = True
            self._refuse_the_rest()
            self._outbox.put(None)

    def _take_messages(self, core: EngineCore) -> bool:
        """Handle what has arrived; wait for something if there is no work. False to stop."""
        try:
            while True:
                message = self._inbox.get(block=not core.has_work)
                if not self._handle(core, message):
                    return False
        except Empty:
            return True

    def _handle(self, core: EngineCore, message: _Message) -> bool:
        match message:
            case _Submit(request):
                core.add(request)
            case _Abort(request_id):
                if outputs := core.abort(request_id):
                    self._outbox.put(outputs)
            case _FlushCache(reply):
                if outputs := core.flush_cache():
                    self._outbox.put(outputs)
                reply.set_result(None)
            case _Tree(reply):
                try:
                    reply.set_result(list(core.scheduler.cache.walk()))
                except Exception as error:
                    reply.set_exception(error)
            case _Stop():
                return False
        self._stats = core.stats()
        return True

    def _refuse_the_rest(self) -> None:
        """Answer whoever waits for a reply that will not come."""
        error = EngineClosedError("the engine was closed")
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(message, _FlushCache | _Tree):
                message.reply.set_exception(error)

    def _run_delivery(self) -> None:
        while (outputs := self._outbox.get()) is not None:
            self._deliver(outputs)
        self._deliver([])
