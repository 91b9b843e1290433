"""Loops of a test's own, and what is left on them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from sapwood.frontend_lang.background import Background
from sapwood.frontend_lang.process import PROCESS


@contextmanager
def own_loop() -> Iterator[Background]:
    """A loop in the place of the process's, which is closed in the end."""
    background = Background()
    before, PROCESS.background = PROCESS.background, background
    try:
        yield background
    finally:
        background.close()
        PROCESS.background = before


def num_tasks_left(background: Background) -> int:
    """How many tasks are on a loop, once those that end are through."""
    return background.run(_other_tasks())


async def _other_tasks() -> int:
    for _ in range(1000):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return 0
        await asyncio.sleep(0.001)
    return len(others)
