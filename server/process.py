"""A server process that ends well: requests in flight may finish, and the rest are told."""

import asyncio
import socket
import sys

import uvicorn
from fastapi import FastAPI

from sapwood.server.serving import Serving

DRAIN_SECONDS = 3.0  # that requests in flight have once the server is told to end
GRACE_SECONDS = 5.0  # after which connections are cut
# How long a thread may hold the interpreter while others want it; Python's own is ten times that.
# A step of the engine gives it away and takes it back in every operation, so where a large request
# is checked beside it, each of them would wait for so long.
SWITCH_SECONDS = 0.0005


class DrainingServer(uvicorn.Server):
    """uvicorn, except that it closes the engine before it cuts connections.

    So a stream that runs on ends with an error event, not with a broken connection.
    """

    def __init__(self, app: FastAPI, *, drain_seconds: float = DRAIN_SECONDS) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(drain_seconds + GRACE_SECONDS),
        )
        super().__init__(config)
        self._serving: Serving = app.state.serving
        self._drain_seconds = drain_seconds

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to end. Sets how often the threads of this process take turns."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            super().run(sockets)
        finally:
            sys.setswitchinterval(interval)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.ensure_future(self._close_engine())
        await super().shutdown(sockets)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)

    async def _close_engine(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await asyncio.to_thread(self._serving.close)
