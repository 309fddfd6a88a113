"""The command `ao`: groups of commands, tables and JSON. Needs the extra `cli` of ao-core."""

from __future__ import annotations

from ao_core.cli import check_packages
from ao_core.cli.app import make_group
from ao_core.cli.output import JSON, show_json, show_table

__all__ = [
    "JSON",
    "check_packages",
    "make_group",
    "show_json",
    "show_table",
]
