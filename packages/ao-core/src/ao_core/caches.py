"""Where packages keep data on disk that can be recomputed, such as measured times."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder(name: str) -> Path:
    """The folder of one cache: below AO_CACHE, or where the platform has users' caches."""
    if given := os.environ.get("AO_CACHE"):
        return Path(given) / name
    from platformdirs import user_cache_path

    return user_cache_path("ao", appauthor=False) / name
