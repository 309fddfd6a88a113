"""Every built-in kernel passes the suite that plugin authors use."""

from __future__ import annotations

import torch

from ao_core.dispatch import CONVERSIONS
from ao_core.testing import KernelSuite
from ao_core.torch_kernels import BUILTIN_KERNELS

#: for conversions, whose references are compared with themselves
_FEWER = {"shapes": ((16, 64), (33, 70)), "dtypes": (torch.bfloat16,)}

for _record in BUILTIN_KERNELS:
    _name = f"Test_{_record.name}"
    _fewer = _record.op in CONVERSIONS and _record.op != "hadamard"
    _fields = {"kernel": _record.name, **(_FEWER if _fewer else {})}
    globals()[_name] = type(_name, (KernelSuite,), _fields)
