"""Matmuls and attention of dense tensors in what the processor computes fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["computed_fast", "fast_dense"]

_FUNCTIONS = (F.linear, F.scaled_dot_product_attention)
_PLAIN = (Tensor, nn.Parameter)


@contextmanager
def fast_dense() -> Iterator[None]:
    """Within this context `F.linear` and `F.scaled_dot_product_attention` are called by `computed_fast`.

    Compiled models run without their compiled code meanwhile, in which the calls could not be seen.
    """
    with torch.compiler.set_stance("force_eager"), _FastDense():
        yield


class _FastDense(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _FUNCTIONS:
            return computed_fast(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def computed_fast(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call a function of tensors, in float32 where they are of 16 bits that a CPU has no fast matmul of.

    Without AVX-512 or its ARM counterpart torch multiplies bfloat16 at a sixth of the speed of float32, and
    takes as much longer for the gradients of attention. The result has the same dtype: operands are those
    of 16 bits, and sums in float32 are rounded once. Autocast is respected.
    """
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    dtype = _computed_in([x for x in given if x.dtype.is_floating_point])
    if dtype not in _slow() or not all(_is_dense(x) for x in given):
        return func(*args, **kwargs)

    def wide(x: Any) -> Any:
        is_number = isinstance(x, Tensor) and x.dtype.is_floating_point
        return x.to(dtype).float() if is_number else x

    with torch.autocast("cpu", enabled=False):
        out = func(*map(wide, args), **{name: wide(x) for name, x in kwargs.items()})
    return out.to(dtype)


def _is_dense(x: Tensor) -> bool:
    return type(x) in _PLAIN and x.device.type == "cpu"


def _computed_in(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype in which a CPU computes with these tensors; None: with several."""
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
