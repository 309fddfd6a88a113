"""Every built-in way to choose scales passes the suite that plugin authors use."""

from __future__ import annotations

from ao_core.scales import BUILTIN_SCALES
from ao_core.testing import ScaleSuite

for _record in BUILTIN_SCALES:
    _name = f"Test_{_record.name}"
    globals()[_name] = type(_name, (ScaleSuite,), {"scale_method": _record.name})
