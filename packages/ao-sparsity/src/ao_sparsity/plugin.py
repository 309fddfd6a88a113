"""The records that ao-sparsity adds to the registry of ao-core."""

from __future__ import annotations

from collections.abc import Iterable

from ao_core import hookimpl
from ao_core.layouts import Layout
from ao_sparsity.layouts import LAYOUTS

__all__ = ["ao_api", "ao_layouts"]


@hookimpl
def ao_api() -> tuple[int, int]:
    """The version of ao-core's plugin API that this package was written for."""
    return (0, 1)


@hookimpl
def ao_layouts() -> Iterable[Layout]:
    """Values without those that are zero."""
    return LAYOUTS
