"""Every built-in recipe passes the suites that plugin authors use."""

from __future__ import annotations

from ao_core.recipes import BUILTIN_RECIPES
from ao_core.testing import ComputeSuite, TransformSuite

for _record in BUILTIN_RECIPES:
    for _suite in (TransformSuite, ComputeSuite):
        _name = f"Test_{_record.name.replace('/', '_')}_{_suite.__name__}"
        globals()[_name] = type(_name, (_suite,), {"config": _record.config})
