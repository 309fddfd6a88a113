"""The command `ao`: groups of commands, tables and JSON, which need the extra `cli` of ao-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.cli import check_packages
from ao_core.cli.settings import load_config
from ao_core.lazy import lazy_names

if TYPE_CHECKING:
    from ao_core.cli.app import make_group
    from ao_core.cli.output import JSON, show_json, show_table

__all__ = [
    "JSON",
    "check_packages",
    "load_config",
    "make_group",
    "show_json",
    "show_table",
]

#: their modules import Typer and Rich; `check_packages` says in a sentence where these are missing
_MODULES = {
    "JSON": "ao_core.cli.output",
    "make_group": "ao_core.cli.app",
    "show_json": "ao_core.cli.output",
    "show_table": "ao_core.cli.output",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
