"""The kernels of `write_tail` and `encode_tokens` on the CPU: each is one call into C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ao_core import Kernel, QTensor, Spec
from ao_core.ext import registry
from ao_core.ext.kernels import EncodeTokensCall, WriteTailCall
from ao_core.ext.numerics import MX_MODES, full_block, hadamard_factors
from ao_kernels.cpu.attend import GREATEST_HEAD, refuses_steps
from ao_kernels.cpu.formats import format_of
from ao_kernels.cpu.library import unavailable
from ao_kernels.cpu.quantize import ELEMENTS, reach, zero_kind

__all__ = ["TAIL_KERNELS", "encode_tokens", "write_tail"]

#: `kCacheBlock` of csrc/cpu/cache/kernels.h, and `kChunkGroups` of csrc/cpu/quantize/kernels.h
_TOKENS, _MOST_BLOCKS = 128, 256
#: where keys and values keep what the op is told of them, among what tensors remember
_CODING = "ao_kernels.cpu.tail"


def write_tail(
    counts: Tensor,
    tail_key: Tensor,
    tail_value: Tensor,
    key: Tensor,
    value: Tensor,
    coded: int,
) -> None:
    """All rows are copied in one call into C++, without gradients."""
    if key.requires_grad or value.requires_grad:
        key, value = key.detach(), value.detach()
    torch.ops.ao_kernels.write_tail.default(counts, tail_key, tail_value, key, value, coded)


def encode_tokens(
    stored_key: QTensor,
    stored_value: QTensor,
    tail_key: Tensor,
    tail_value: Tensor,
    key: Tensor,
    value: Tensor,
    center: Tensor | None,
    tokens: int,
    begin: int,
    end: int,
) -> None:
    """Exact tokens become codes in their places, those of `quantize` bit for bit, in one call into C++."""
    arguments = (tail_key, tail_value, key, value, center, tokens, begin, end)
    fits = torch.ops.ao_kernels.encode_tokens.default(
        *_coding(stored_key), *_coding(stored_value), *arguments
    )
    if not fits:  # a rotation has gone beyond float32, for which the reference has the words
        reference: Callable[..., None] = registry.kernels.get("reference_encode_tokens").fn
        reference(stored_key, stored_value, *arguments)


def _coding(x: QTensor) -> tuple[Any, ...]:
    """Parts, the format and the rotation. Their memory is written to, but never replaced."""
    found: tuple[Any, ...] | None = x._bound.get(_CODING)
    if found is None:
        found = x._bound[_CODING] = _found_coding(x)
    return found


def _found_coding(x: QTensor) -> tuple[Any, ...]:
    spec, parts, fmt = x.spec, x.parts, format_of(x.format)
    assert not isinstance(fmt, str)  # `refuses` has asked
    block = full_block(spec.block, x.stored_shape)
    # zero points come from the range alone
    mx_mode = "rceil" if spec.zero_point != "none" else spec.option("mx_mode", "floor")
    numbers = [
        fmt.nan_code,
        fmt.rule,
        block[2],
        block[3],
        zero_kind(spec, x.format),
        MX_MODES.index(mx_mode),
    ]
    numbers.append(int(spec.layout == "packed"))
    factors = [factor for step in spec.input for factor in hadamard_factors(step.block)]
    codes = parts["qdata"].view(torch.uint8)
    return (
        codes, parts["scale"], parts.get("zero_point"), fmt.table, fmt.steps, fmt.order, numbers,
        reach(spec, x.format), factors or [1],
    )  # fmt: skip


def _refuses(call: WriteTailCall) -> str | None:
    if call.dtype not in ELEMENTS:
        return f"copies float32, bfloat16 and float16, not {call.dtype}"
    return None


def _refuses_tokens(call: EncodeTokensCall) -> str | None:
    if call.dtype not in ELEMENTS:
        return f"reads float32, bfloat16 and float16, not {call.dtype}"
    if not call.whole:
        return "encodes whole blocks, and the first one was begun before"
    if 0 in call.key_shape or not call.value_dim:
        return f"needs memory for keys and values, found {call.key_shape}"
    shapes = (call.key_shape, (*call.key_shape[:3], call.value_dim))
    for name, spec, shape in zip(("keys", "values"), call.specs, shapes, strict=True):
        if reason := _refuses_spec(spec, shape):
            return f"of {name}: {reason}"
    return None


def _refuses_spec(spec: Spec, shape: tuple[int, ...]) -> str | None:
    if spec.layout not in ("plain", "packed"):
        return f"writes the layouts plain and packed, not {spec.layout}"
    if shape[3] > GREATEST_HEAD:
        return f"takes heads of {GREATEST_HEAD} elements at most, found {shape[3]}"
    if isinstance(spec.scale_dtype, Spec) or spec.scale_dtype == "none":
        return f"needs scales that are numbers, found {spec.scale_dtype}"
    if spec.zero_point == "offset":
        return "takes zero points off before scaling, and this format has offsets"
    if spec.is_static or spec.act is not None:
        return "chooses scales itself, and for no activations"
    *outer, tokens, size = full_block(spec.block, shape)
    if outer != [1, 1] or (tokens > 1 and size > 1) or _TOKENS % tokens:
        return f"needs blocks of one token, or of one element of up to 128, found {spec.block}"
    if tokens == 1 and -(-shape[3] // size) > _MOST_BLOCKS:
        return f"takes {_MOST_BLOCKS} blocks of a token at most, found blocks of {spec.block}"
    if reason := refuses_steps(spec):
        return reason
    dtype = registry.dtypes.get(spec.dtype)
    if dtype.bits > 8 or dtype.kind in ("codebook", "dense"):
        return f"needs codes of up to 8 bits with values of their own, and {dtype.name} has none"
    if dtype.min > 0:
        return "gives blocks of zeros the scale 1, which needs a format that has 0"
    if reason := unavailable():  # the library is asked how it encodes
        return reason
    fmt = format_of(dtype)
    return fmt if isinstance(fmt, str) else None


TAIL_KERNELS = (
    Kernel("cpu_write_tail", "write_tail", "plain", "cpu", write_tail, 50, unavailable, _refuses),
    *(
        Kernel(
            f"cpu_encode_tokens_{layout}", "encode_tokens", layout, "cpu", encode_tokens, 50, unavailable,
            _refuses_tokens, fuses=("hadamard",),
        )
        for layout in ("plain", "packed")
    ),
)  # fmt: skip
