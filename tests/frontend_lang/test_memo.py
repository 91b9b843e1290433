"""What is asked of a server once."""

import asyncio
import gc

import pytest

from sapwood.frontend_lang.backends.memo import Memo

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Work:
    def __init__(self, value: str = "v", *, fails: bool = False) -> None:
        self.value, self.fails, self.count, self.gate = value, fails, 0, asyncio.Event()

    async def __call__(self) -> str:
        self.count += 1
        await self.gate.wait()
        if self.fails:
            raise ValueError(self.value)
        return self.value


def memo(max_size: int = 100) -> Memo[str, str]:
    return Memo(max_size=max_size, size_of=len)


async def test_who_asks_meanwhile_waits_for_the_same_work() -> None:
    kept, work = memo(), Work()
    tasks = [asyncio.ensure_future(kept.get("a", work)) for _ in range(5)]
    await asyncio.sleep(0)
    work.gate.set()
    assert await asyncio.gather(*tasks) == ["v"] * 5
    assert await kept.get("a", work) == "v"
    assert work.count == 1


async def test_who_is_cancelled_leaves_the_work_to_the_others() -> None:
    kept, work = memo(), Work()
    first, second = (asyncio.ensure_future(kept.get("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    work.gate.set()
    assert await second == "v"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert work.count == 1


async def test_an_error_is_told_to_all_and_not_kept() -> None:
    kept, work = memo(), Work(fails=True)
    work.gate.set()
    tasks = [asyncio.ensure_future(kept.get("a", work)) for _ in range(2)]
    for task in tasks:
        with pytest.raises(ValueError, match="v"):
            await task
    await asyncio.sleep(0)
    work.fails = False
    assert await kept.get("a", work) == "v"


async def test_an_error_that_nobody_waits_for_any_more_is_nobodys(caplog) -> None:
    kept, work = memo(), Work(fails=True)
    task = asyncio.ensure_future(kept.get("a", work))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    work.gate.set()
    await asyncio.sleep(0.01)
    gc.collect()
    assert not caplog.records


async def test_the_least_recently_used_is_forgotten_and_too_much_is_never_kept() -> None:
    kept, work = memo(max_size=4), Work()
    work.gate.set()
    for key in ("aa", "bb", "aa", "cc"):
        await kept.get(key, work)
    assert work.count == 3
    await kept.get("aa", work)
    assert work.count == 3
    await kept.get("bb", work)
    assert work.count == 4
    for _ in range(2):
        await kept.get("longer", work)
    assert work.count == 6
    assert kept._size <= 4
