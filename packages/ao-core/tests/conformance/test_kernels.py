"""Every built-in kernel passes the suite that plugin authors use."""

from __future__ import annotations

from ao_core.testing import KernelSuite
from ao_core.torch_kernels import BUILTIN_KERNELS

for _record in BUILTIN_KERNELS:
    _name = f"Test_{_record.name}"
    globals()[_name] = type(_name, (KernelSuite,), {"kernel": _record.name})
