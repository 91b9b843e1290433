"""A Ctrl-C at a known moment."""

import signal
import sys
import threading
import time
from collections.abc import Callable

_LIMIT_SECONDS = 30.0


def interrupt_when(is_time: Callable[[], bool], *, inside: Callable[..., object]) -> None:
    """Interrupt the main thread once it is in a call of `inside` and `is_time()` holds.

    Without the former the signal could meet the main thread anywhere: this very call's end, the
    test's own lines, or pytest, which it would end.
    """
    main = threading.main_thread().ident
    assert main is not None

    def has_come() -> bool:
        return is_time() and _is_running(main, inside)

    def interrupt() -> None:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not has_come() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert has_come(), f"the main thread never came to {inside.__qualname__}"
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def _is_running(thread_id: int, function: Callable[..., object]) -> bool:
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_code is function.__code__:  # type: ignore[attr-defined]
            return True
        frame = frame.f_back
    return False
