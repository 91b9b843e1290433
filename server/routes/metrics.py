"""Numbers for Prometheus: `GET /metrics`."""

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sapwood.server.serving import ServingDep

router = APIRouter(tags=["server"])


@router.get("/metrics", summary="Counters, levels and times, in Prometheus' text format")
async def metrics(serving: ServingDep) -> Response:
    return Response(generate_latest(serving.metrics.registry), media_type=CONTENT_TYPE_LATEST)
