"""Files that somebody names, looked at before they are opened."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ao_core.errors import ConfigError

__all__ = ["not_a_file", "read_text"]

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def not_a_file(path: Path) -> str | None:
    """None, or why this is not a file to read, in words such as "is missing" or "is a pipe, and no file".

    Links are followed. Nothing is opened, since that alone can wait for ever.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except ValueError as error:  # a name that no file can have
        return f"cannot be read: {error}"
    if stat.S_ISREG(mode):
        return None
    kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "something else")
    return f"is {kind}, and no file"


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises:
        ConfigError: it is not a file, or no text.
    """
    if reason := not_a_file(Path(path)):
        raise ConfigError(f"{path} {reason}")
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
