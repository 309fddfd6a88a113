"""What the C++ ops return, told to `torch.compile`: shapes and dtypes. Imported once they are loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ao_core.ext.numerics import packed_size
from ao_kernels.cpu.code_fakes import FAKES as CODE_FAKES


def _linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    scale_outer: Tensor | None,
    zero_point: Tensor | None,
    offset: Tensor | None,
    offset_outer: Tensor | None,
    rowsum: Tensor | None,
    table: Tensor,
    bias_or_offs: Tensor | None,
    n: int,
    bits: int,
    group: int,
    span: int,
    kind: int,
    act: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _stored_linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    scale_outer: Tensor | None,
    zero_point: Tensor | None,
    offset: Tensor | None,
    offset_outer: Tensor | None,
    rowsum: Tensor | None,
    table: Tensor,
    bias: Tensor | None,
    n: int,
    bits: int,
    group: int,
    span: int,
    kind: int,
    act: int,
    stored: int,
    fill: int,
    act_scale: Tensor | None,
    act_zero_point: Tensor | None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _cuda_linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    group: int,
    format: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _pack_tiles(packed: Tensor, n: int, k: int, bits: int, group: int, flip: int) -> Tensor:
    group = min(group, k)
    last = k - (k - 1) // group * group
    tiles = (k - 1) // group * -(-group // 16) + -(-last // 16)
    return packed.new_empty((*packed.shape[:-2], -(-n // 16), tiles, 32 * bits))


def _unpack_tiles(qdata: Tensor, n: int, k: int, bits: int, group: int, flip: int) -> Tensor:
    return qdata.new_empty((*qdata.shape[:-3], n, packed_size(k, bits)), dtype=torch.uint8)


def _block_sparse_linear(
    x: Tensor,
    qdata: Tensor,
    col_indices: Tensor,
    crow_indices: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    n: int,
    act: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _two_four_linear(
    x: Tensor,
    qdata: Tensor,
    index: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    group: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


def _two_four_mask(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bool)


def _two_four_dequantize(
    qdata: Tensor,
    index: Tensor,
    scale: Tensor | None,
    table: Tensor | None,
    k: int,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    return qdata.new_empty((*qdata.shape[:-1], k), dtype=dtype)


def _hadamard(x: Tensor, factors: list[int], inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _attend(
    q: Tensor,
    key: Tensor,
    key_scale: Tensor,
    key_zero: Tensor | None,
    key_table: Tensor,
    key_factors: list[int],
    value: Tensor,
    value_scale: Tensor,
    value_zero: Tensor | None,
    value_table: Tensor,
    value_factors: list[int],
    blocks: list[int],
    value_dim: int,
    counts: Tensor,
    *_: Any,
) -> Tensor:
    return q.new_empty((*q.shape[:-1], value_dim))


def _qkv(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, tokens, _), (query, key, dim) = x.shape, arguments[-1]
    return tuple(x.new_empty(batch, n, tokens, dim) for n in (query, key, key))  # type: ignore[return-value]


def _mlp(x: Tensor, *arguments: Any) -> Tensor:
    rows, *_ = arguments[-2]  # the numbers of the last weight
    return x.new_empty((*x.shape[:-1], rows))


def _decoder(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    blocks, columns = arguments[-2:]
    return x.new_empty((blocks, *x.shape)), x.new_empty((*x.shape[:-1], columns))


def _step(*arguments: Any, **named: Any) -> None:
    """Returns nothing."""


def _write_tail(
    counts: Tensor,
    tail_key: Tensor,
    tail_value: Tensor,
    key: Tensor,
    value: Tensor,
    coded: int,
) -> None:
    """Returns nothing."""


def _trellis_encode(x: Tensor, table: Tensor, multiplier: int, bits: int, count: int) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.uint8)


def _trellis_linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    table: Tensor,
    multiplier: int,
    bits: int,
    n: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _trellis_dequantize(
    qdata: Tensor,
    scale: Tensor,
    table: Tensor,
    multiplier: int,
    bits: int,
    n: int,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    return qdata.new_empty((n, k), dtype=dtype)


def _encode_tokens(key: Tensor, key_scale: Tensor, *arguments: Any) -> bool:
    """Whether numbers fit, which is seen when it runs."""
    return True


FAKES: dict[str, Callable[..., Any]] = {
    **CODE_FAKES,
    "adam_step": _step,
    "attend": _attend,
    "encode_tokens": _encode_tokens,
    "cuda_linear": _cuda_linear,
    "block_sparse_linear": _block_sparse_linear,
    "two_four_mask": _two_four_mask,
    "two_four_dequantize": _two_four_dequantize,
    "two_four_linear": _two_four_linear,
    "decoder": _decoder,
    "hadamard": _hadamard,
    "lion_step": _step,
    "linear": _linear,
    "stored_linear": _stored_linear,
    "mlp": _mlp,
    "qkv": _qkv,
    "grouped_linear": _linear,
    "pack_tiles": _pack_tiles,
    "rule_step": _step,
    "unpack_tiles": _unpack_tiles,
    "trellis_dequantize": _trellis_dequantize,
    "trellis_encode": _trellis_encode,
    "trellis_linear": _trellis_linear,
    "write_tail": _write_tail,
}


def _checked(fake: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse None where a tensor must be, as the ops do: torch lets it pass."""
    parameters = inspect.signature(fake).parameters
    tensors = [name for name, parameter in parameters.items() if parameter.annotation == "Tensor"]

    @wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        for name in tensors:
            if given.get(name) is None:
                raise RuntimeError(f"{name}: must be a tensor, found None")
        return fake(*args, **kwargs)

    return checked


for _name, _fake in FAKES.items():
    torch.library.register_fake(f"ao_kernels::{_name}", _checked(_fake))
