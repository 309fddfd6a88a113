"""Dense matmuls of layers in what the processor computes fast."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["FastLinear", "fast_linear"]

_PLAIN = (Tensor, nn.Parameter)


class FastLinear(TorchFunctionMode):
    """Within this context `F.linear` is `fast_linear`."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return (fast_linear if func is F.linear else func)(*args, **(kwargs or {}))


def fast_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, in float32 where its dtype is one of 16 bits that a CPU has no fast matmul of.

    Without AVX-512 or its ARM counterpart torch multiplies bfloat16 at a sixth of the speed of float32.
    The result has the same dtype: operands are those of 16 bits, and the sum in float32, with the bias,
    is rounded once. Gradients are computed in the same way, and autocast is respected.
    """
    tensors = [input, weight] if bias is None else [input, weight, bias]
    dtype = _dtype_of(tensors)
    if dtype not in _slow():
        return F.linear(input, weight, bias)
    with torch.autocast("cpu", enabled=False):
        return F.linear(*(x.to(dtype).float() for x in tensors)).to(dtype)


def _dtype_of(tensors: list[Tensor]) -> torch.dtype | None:
    """The dtype in which a CPU multiplies dense tensors; None: they are others."""
    if not all(type(x) in _PLAIN and x.device.type == "cpu" for x in tensors):
        return None
    dtypes = {x.dtype for x in tensors}
    if torch.is_autocast_enabled("cpu") and torch.float64 not in dtypes:
        return torch.get_autocast_dtype("cpu")
    return dtypes.pop() if len(dtypes) == 1 else None


@cache
def _slow() -> frozenset[torch.dtype]:
    """The dtypes of 16 bits that this processor has no fast matmul of."""
    ops: Any = torch.ops.mkldnn
    checks = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    return frozenset(
        dtype for dtype, name in checks.items() if not (hasattr(ops, name) and getattr(ops, name)())
    )
