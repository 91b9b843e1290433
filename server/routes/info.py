"""What is served, and how it is doing: `GET /get_model_info` and `GET /get_server_info`.

SGLang's names, older and newer, and its fields as far as we have them.
"""

from typing import Any

from fastapi import APIRouter

import sapwood
from sapwood.server.serving import Serving, ServingDep

router = APIRouter(tags=["server"])


@router.get("/get_model_info", summary="The model that is served")
@router.get("/model_info", include_in_schema=False)
async def model_info(serving: ServingDep) -> dict[str, Any]:
    """`reasoning_tags` stand around what the model writes before it answers, if it does."""
    return _model_info(serving)


@router.get("/get_server_info", summary="The engine's settings, and its counts so far")
@router.get("/server_info", include_in_schema=False)
async def server_info(serving: ServingDep) -> dict[str, Any]:
    info, stats = serving.engine.info, serving.engine.stats()
    return _model_info(serving) | {
        "device": info.device,
        "precision": info.precision,
        "kernels": info.kernels,
        "schedule_policy": info.schedule_policy,
        "prefix_caching": info.prefix_caching,
        "page_size": info.block_size,
        "max_total_num_tokens": info.kv_capacity_tokens,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "max_graph_rows": info.max_graph_rows,
        "stats": {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_steps": stats.num_steps,
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "computed_tokens": stats.computed_tokens,
            "generated_tokens": stats.generated_tokens,
            "fixed_rows_per_step": stats.fixed_rows_per_step,
        },
    }


def _model_info(serving: Serving) -> dict[str, Any]:
    info = serving.engine.info
    tags = info.reasoning_tags
    return {
        "server": "sapwood",
        "version": sapwood.__version__,
        "model_path": info.model_name,
        "tokenizer_path": info.model_name,
        "served_model_names": serving.model_names,
        "is_generation": True,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "has_chat_template": info.has_chat_template,
        "reasoning_tags": None if tags is None else [tags.open, tags.close],
    }
