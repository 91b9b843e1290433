"""How the process is: `GET /health`, `GET /ready`, `GET /version`; and `/flush_cache`."""

from typing import Any

from fastapi import APIRouter

import sapwood
from sapwood.server.errors import unavailable
from sapwood.server.serving import ServingDep

router = APIRouter(tags=["server"])


@router.get("/", include_in_schema=False)
async def index() -> dict[str, Any]:
    return {"name": "sapwood", "version": sapwood.__version__, "docs": "/docs", "api": "/v1"}


@router.get("/health", summary="Alive: 503 once only a restart would help")
async def health(serving: ServingDep) -> dict[str, str]:
    if serving.has_failed:
        raise unavailable("the engine is not running; restart the server, its log has the reason")
    return {"status": "ok"}


@router.get("/ready", summary="Ready for requests: 503 while the model is being loaded")
async def ready(serving: ServingDep) -> dict[str, str]:
    model = serving.engine.info.model_name
    if serving.has_failed:
        raise unavailable("the engine is not running; restart the server, its log has the reason")
    return {"status": "ready", "model": model}


@router.get("/version", summary="The version of the server")
async def version() -> dict[str, str]:
    return {"version": sapwood.__version__}


@router.get("/flush_cache", include_in_schema=False)  # SGLang takes both
@router.post("/flush_cache", summary="Drop every cached prefix that no running request uses")
async def flush_cache(serving: ServingDep) -> dict[str, str]:
    await serving.engine.flush_cache()
    return {"status": "flushed"}
