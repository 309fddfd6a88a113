"""Every built-in layout passes the suite that plugin authors use."""

from __future__ import annotations

from ao_core.layouts import BUILTIN_LAYOUTS
from ao_core.testing import LayoutSuite

for _record in BUILTIN_LAYOUTS:
    _name = f"Test_{_record.name}"
    globals()[_name] = type(_name, (LayoutSuite,), {"layout": _record.name})
