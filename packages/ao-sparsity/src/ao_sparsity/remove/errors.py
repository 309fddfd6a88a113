"""The error of structured removal."""

from __future__ import annotations

from ao_core.ext import GraphError

__all__ = ["RemovalError"]


class RemovalError(GraphError):
    """Channels could not be removed from a model; the model is as it was."""
