"""Which models are served: `GET /v1/models`."""

from typing import Any

from fastapi import APIRouter

from sapwood.server.serving import Serving, ServingDep

router = APIRouter(tags=["openai"])


@router.get("/v1/models", summary="The models that are served")
async def list_models(serving: ServingDep) -> dict[str, Any]:
    models = [_describe(serving, name) for name in serving.model_names]
    return {"object": "list", "data": models}


@router.get("/v1/models/{model_id:path}", summary="One model; its id may have slashes")
async def get_model(model_id: str, serving: ServingDep) -> dict[str, Any]:
    return _describe(serving, serving.model_name(model_id))


def _describe(serving: Serving, name: str) -> dict[str, Any]:
    info = serving.engine.info
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "sapwood",
        "root": info.model_name,
        "max_model_len": info.max_model_len,
    }
