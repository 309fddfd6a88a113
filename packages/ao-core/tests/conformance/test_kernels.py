"""Every built-in kernel passes the suite that plugin authors use."""

from __future__ import annotations

import torch

from ao_core.registry import registry
from ao_core.testing import KernelSuite

#: for conversions, whose references are compared with themselves
_FEWER = {"shapes": ((16, 64), (33, 70)), "dtypes": (torch.bfloat16,)}
#: conversions whose trials have shapes of their own
_OWN_SHAPES = ("hadamard", "encode_tokens")

for _record in registry.kernels.builtin():
    _name = f"Test_{_record.name}"
    _few = registry.ops.get(_record.op).is_conversion and _record.op not in _OWN_SHAPES
    _fields = {"kernel": _record.name, **(_FEWER if _few else {})}
    globals()[_name] = type(_name, (KernelSuite,), _fields)
