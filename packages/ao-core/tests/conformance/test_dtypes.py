"""Every built-in number format passes the suite that plugin authors use."""

from __future__ import annotations

from ao_core.dtypes import BUILTIN_DTYPES
from ao_core.testing import DTypeSuite

for _record in BUILTIN_DTYPES:
    _name = f"Test_{_record.name}"
    globals()[_name] = type(_name, (DTypeSuite,), {"dtype": _record.name})
