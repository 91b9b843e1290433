"""The error for a model that is not served, with the true reason and what would work."""

from __future__ import annotations

from sapwood.runtime.errors import UnsupportedModelError
from sapwood.runtime.models import MODELS


def refused(model_type: str, reason: str) -> UnsupportedModelError:
    """The error that says why `model_type` is not served; `reason` is a clause."""
    return UnsupportedModelError(
        f"model_type {model_type!r} is not served: {reason}. Served are {', '.join(MODELS)}, and "
        "through transformers the decoders of text listed in docs/models.md"
    )
