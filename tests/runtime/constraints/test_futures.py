"""Several futures as one."""

from concurrent.futures import CancelledError, Future

import pytest

from sapwood.runtime.constraints.futures import all_of


def pending(count: int) -> list[Future[int]]:
    return [Future() for _ in range(count)]


def test_results_come_in_the_order_of_the_futures() -> None:
    futures = pending(2)
    together = all_of(futures)
    futures[1].set_result(1)
    assert not together.done()
    futures[0].set_result(0)
    assert together.result(0) == [0, 1]


def test_it_is_done_at_once_where_all_are() -> None:
    assert all_of([]).result(0) == []
    [future] = pending(1)
    future.set_result(7)
    assert all_of([future]).result(0) == [7]


def test_the_first_that_fails_fails_it_and_the_rest_is_cancelled() -> None:
    futures = pending(3)
    together = all_of(futures)
    futures[0].set_result(0)
    futures[2].set_exception(ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        together.result(0)
    assert futures[1].cancelled()


def test_cancelling_it_cancels_what_is_not_done() -> None:
    futures = pending(2)
    together = all_of(futures)
    futures[0].set_result(0)
    assert together.cancel()
    assert futures[1].cancelled()
    with pytest.raises(CancelledError):
        together.result(0)


def test_what_fails_after_it_has_failed_is_no_matter() -> None:
    futures = pending(2)
    for future in futures:
        future.set_exception(ValueError(f"{id(future)}"))
    with pytest.raises(ValueError, match=str(id(futures[0]))):
        all_of(futures).result(0)
