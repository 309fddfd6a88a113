"""Runs a compiler or a linker; where it fails, a file gets its first error: `tell.py FILE COMMAND...`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """The exit status of the command."""
    reason, command = Path(sys.argv[1]), sys.argv[2:]
    done = subprocess.run(
        command, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", check=False
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        error = next((line for line in lines if "error" in line), lines[0]).strip()
        # at once: several may fail at a time
        written = reason.with_suffix(f".{os.getpid()}")
        text = f"{Path(command[0]).name} does not compile or link it ({error})\n"
        written.write_text(text, encoding="utf-8")
        written.replace(reason)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
