"""`python -m ao_core.cli` is the `ao` command."""

from __future__ import annotations

from ao_core.cli import main

main()
