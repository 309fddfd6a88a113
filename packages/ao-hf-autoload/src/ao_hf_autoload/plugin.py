"""The records that ao-hf-autoload adds to the registry of ao-core."""

from __future__ import annotations

from ao_core import hookimpl


@hookimpl
def ao_api() -> tuple[int, int]:
    """The version of ao-core's plugin API that this package was written for."""
    return (0, 1)
