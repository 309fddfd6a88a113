"""Prints where torch's package is, without importing it: its headers are in include/, its libraries in lib/.

In an isolated build torch cannot be imported, but pip runs it with the Python of the environment that it
installs into, so that the torch installed there is found too. Ends with a reason where there is none, or
where it is too old.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path


def homes() -> list[Path]:
    """Where torch may be."""
    spec = importlib.util.find_spec("torch")
    found = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return found + [Path(sysconfig.get_path(name)) / "torch" for name in ("platlib", "purelib")]


def main() -> str:
    """Print the place; otherwise a sentence without its end."""
    for home in homes():
        version = home / "include" / "torch" / "headeronly" / "version.h"
        if not version.is_file():
            continue
        text = version.read_text(encoding="utf-8")
        parts = "MAJOR", "MINOR"
        found = [re.search(rf"define TORCH_VERSION_{part} (\d+)", text) for part in parts]
        numbers = tuple(int(match[1]) for match in found if match)
        if numbers < (2, 11):
            return f"torch >= 2.11 was needed, found {'.'.join(map(str, numbers))}"
        sys.stdout.write(f"{home}\n")
        return ""
    return "the headers of torch were not found: install torch first"


if __name__ == "__main__":
    sys.exit(main() or 0)
