"""The command `ao`: groups of commands, tables and JSON. Needs the extra `cli` of ao-core."""

from __future__ import annotations

from ao_core.cli import check_packages
from ao_core.cli.app import make_group
from ao_core.cli.output import JSON, show_json, show_table
from ao_core.cli.settings import load_config

__all__ = [
    "JSON",
    "check_packages",
    "load_config",
    "make_group",
    "show_json",
    "show_table",
]
