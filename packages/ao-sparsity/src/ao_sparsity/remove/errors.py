"""The error of structured removal."""

from __future__ import annotations

from ao_core.errors import AoError

__all__ = ["RemovalError"]


class RemovalError(AoError, RuntimeError):
    """Channels could not be removed from a model; the model is as it was."""
