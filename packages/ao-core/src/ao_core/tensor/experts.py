"""Matmuls with the 3-D weights of experts: the op "grouped_linear", and what it cannot serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ao_core.dispatch import run
from ao_core.errors import UnsupportedOp
from ao_core.tensor import cut
from ao_core.tensor.matmuls import call_of, check_floating, matmul_values
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import to_canonical
from ao_core.tensor.tables import rule

__all__ = ["by_expert", "checked_ends", "is_traced"]

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: how ``w.transpose(-2, -1)`` orders the stored dimensions (E, N, K)
_TRANSPOSED = (0, 2, 1)


# compiled models of transformers, in another dtype than bfloat16, call an op of its own
@rule(aten._grouped_mm.default, "transformers::grouped_mm_fallback")
def _grouped_mm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, w = args[:2]
    named = {**dict(zip(("offs", "bias", "out_dtype"), args[2:], strict=False)), **kwargs}
    offs = named.get("offs")
    as_linear = named.get("bias") is None and named.get("out_dtype") in (None, x.dtype)
    ranks = (2, 3) if offs is not None else (3, 3)
    if as_linear and (x.dim(), w.dim()) == ranks and _is_weight(w, x):
        return _matmul(func, args, kwargs, offs)
    return matmul_values(func, args, kwargs)


@rule(aten.bmm.default)
def _bmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, w = args
    if _is_weight(w, x) and x.dim() == 3:
        return _matmul(func, args, kwargs, None)
    return matmul_values(func, args, kwargs)


def _is_weight(w: Any, x: Any) -> bool:
    return isinstance(w, QTensor) and w.flat_from is None and not isinstance(x, QTensor)


def _matmul(func: Any, args: Args, kwargs: Kwargs, offs: Tensor | None) -> Any:
    """``x @ w`` for the rows of each expert, with a logical weight (E, K, N)."""
    x, w = args[:2]
    _check(x, w, offs)
    if w.order == _TRANSPOSED:
        weight = w.transpose(-2, -1)
        return run(call_of("grouped_linear", x, weight), x, weight, offs)
    if is_traced(x):
        return matmul_values(func, args, kwargs)
    return by_expert(x, w, offs, w.shape[-1], _mm_dense)


def _mm_dense(rows: Tensor, expert: Tensor) -> Tensor:
    dense = expert.dequantize(rows.dtype) if isinstance(expert, QTensor) else expert
    return rows @ dense


def _check(x: Tensor, w: QTensor, offs: Tensor | None) -> None:
    check_floating("a matmul with the weights of experts", x)
    experts, k = w.shape[:2]
    if x.shape[-1] != k or (offs is None and x.shape[0] != experts):
        raise UnsupportedOp(
            f"input of shape {tuple(x.shape)} does not fit the weights {tuple(w.shape)} of experts"
        )
    if offs is not None and (tuple(offs.shape) != (experts,) or offs.dtype != torch.int32):
        raise UnsupportedOp(
            f"offs of shape {tuple(offs.shape)} and {offs.dtype}: {experts} experts need that many "
            "int32 ends of rows"
        )


def is_traced(x: Tensor) -> bool:
    """Whether `x` has no values, so that nothing can depend on where groups of rows end."""
    from torch._subclasses.fake_tensor import is_fake

    return x.is_meta or is_fake(x)


def by_expert(
    x: Tensor,
    w: QTensor,
    offs: Tensor | None,
    n: int,
    matmul: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Columns (…, n) of ``matmul(rows of x, weight of their expert)``, zero where no expert has a row.

    One expert is taken at a time and only if it has rows, so that no more than one need be dense.

    Args:
        x: (M, K) with `offs`, or (E, M, K) without.
        w: of logical shape (E, …).
        offs: int32 (E,), the row after each expert's last.
        n: columns of a matmul.
        matmul: of rows (m, K) and an expert's weight, a `QTensor` where the layout can be cut.
    """
    rows, experts = x.reshape(-1, x.shape[-1]), w.shape[0]
    if offs is None:
        ends = [x.shape[1] * (expert + 1) for expert in range(experts)]
    else:
        ends = checked_ends(offs, len(rows))
    out = x.new_zeros(len(rows), n)
    take, start = _taker(w, x.dtype), 0
    for expert, end in enumerate(ends):
        if end > start:
            out[start:end] = matmul(rows[start:end], take(expert))
        start = end
    return out.reshape(*x.shape[:-1], n)


def checked_ends(offs: Tensor, rows: int) -> list[int]:
    """The row after each expert's last; raises `UnsupportedOp` where they decrease or exceed `rows`."""
    ends: list[int] = offs.tolist()
    if any(a > b for a, b in zip([0, *ends], [*ends, rows], strict=True)):
        raise UnsupportedOp(
            f"offs={ends}: must not decrease, from 0 to the {rows} rows of the input"
        )
    return ends


def _taker(w: QTensor, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Gives the weight of an expert; dense ones where their codes are stored together."""
    if not cut.is_stacked(w):
        w = to_canonical(w)  # else each cut would convert all of it
    try:
        if w.shape[0]:
            cut.select(w, 0, 0)
    except UnsupportedOp:
        dense = w.dequantize(dtype)
        return lambda expert: dense[expert]
    return lambda expert: cut.select(w, 0, expert)
