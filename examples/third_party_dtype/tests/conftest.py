"""Lets the tests run from a checkout where the package is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import ao_core
from ao_core.ext import registry

if "log4" not in registry.dtypes:
    source = Path(__file__).parents[1] / "src" / "ao_log4.py"
    spec = importlib.util.spec_from_file_location("ao_log4", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for record in module.ao_dtypes():
        ao_core.register(record)
