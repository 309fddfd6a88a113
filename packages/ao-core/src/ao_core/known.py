"""Names that ao's own packages register, for errors that say which package to install."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["KNOWN", "known_names", "whose"]

#: distribution -> the names of its formats, layouts, recipes, …; `scripts/write_known_names.py` writes it
KNOWN = Path(__file__).with_name("known_names.json")


def known_names() -> dict[str, list[str]]:
    """The names that each of ao's packages registers, by distribution."""
    return json.loads(KNOWN.read_text("utf-8"))  # type: ignore[no-any-return]


def whose(name: str) -> list[str]:
    """A sentence on which package to install for an unknown name; none where no missing one of ao has it."""
    return [
        f"It comes with {dist}, which is not installed: pip install {dist}."
        for dist, names in known_names().items()
        if name in names and not _is_installed(dist)
    ]


def _is_installed(dist: str) -> bool:
    try:
        return bool(version(dist))
    except PackageNotFoundError:
        return False
