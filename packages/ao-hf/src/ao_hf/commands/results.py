"""Results of a command as JSON and Markdown, in files whose places are checked before the work begins."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ao_core.ext import ConfigError

__all__ = ["check_files", "markdown", "numbers", "write_json"]


def check_files(**files: Path | None) -> None:
    """Raise where a file could not be written; names are those of the options."""
    for name, path in files.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no directory {path.parent}")
        if path is not None and path.is_dir():
            raise ConfigError(f"--{name} {path}: is a directory; name a file")


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON, numbers that JSON has not as null."""
    path.write_text(json.dumps(_finite(data), indent=1) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def numbers(option: str, text: str) -> list[int]:
    """Positive numbers with commas between them.

    Raises:
        ConfigError: it is not that; names the option.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"{option} {text}: give positive numbers with commas between them, such as 1,64"
        )
    return [int(part) for part in parts]
