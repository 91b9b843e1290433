"""Several futures as one."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def all_of(futures: Sequence[Future[T]]) -> Future[list[T]]:
    """Done with the results of all, in their order; failed with the first that fails.

    Whether it fails or is cancelled, all that are not done are cancelled; nobody else should
    cancel them. It is done at once where all of them are.
    """
    together: Future[list[T]] = Future()
    num_missing = len(futures)
    lock = threading.Lock()  # over the number

    def note(future: Future[T]) -> None:
        nonlocal num_missing
        if future.cancelled():
            return
        error = future.exception()
        with lock:
            num_missing -= 1
            is_last = num_missing == 0
        with suppress(InvalidStateError):  # it has failed, or was cancelled, meanwhile
            if error is not None:
                together.set_exception(error)
            elif is_last:
                together.set_result([future.result() for future in futures])

    def cancel_the_rest(_: Future[list[T]]) -> None:
        for future in futures:
            future.cancel()

    together.add_done_callback(cancel_the_rest)
    for future in futures:
        future.add_done_callback(note)
    if not futures:
        together.set_result([])
    return together
