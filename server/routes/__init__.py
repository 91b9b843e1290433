"""Endpoints, one file per family. A new one is a file with a `router` and a line here."""

from collections.abc import Mapping
from types import MappingProxyType

ROUTES: Mapping[str, str] = MappingProxyType(
    {
        "chat": "sapwood.server.routes.chat:router",
        "completions": "sapwood.server.routes.completions:router",
        "models": "sapwood.server.routes.models:router",
        "generate": "sapwood.server.routes.generate:router",
        "tokens": "sapwood.server.routes.tokens:router",
        "info": "sapwood.server.routes.info:router",
        "health": "sapwood.server.routes.health:router",
        "metrics": "sapwood.server.routes.metrics:router",
    }
)
