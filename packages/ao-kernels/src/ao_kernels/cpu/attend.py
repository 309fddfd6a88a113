"""The kernel of `attend` on the CPU: codes meet the queries as they are, a tile of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ao_core import Kernel, QTensor, Spec
from ao_core.ext import ConfigError, registry
from ao_core.ext.kernels import AttendCall, Attention
from ao_core.ext.numerics import full_block, hadamard_factors
from ao_kernels.cpu.formats import format_of
from ao_kernels.cpu.library import isa, unavailable, want_alone
from ao_kernels.cpu.quantize import ELEMENTS

__all__ = [
    "ATTEND_KERNELS",
    "GREATEST_HEAD",
    "arguments_of",
    "attend",
    "refuses_steps",
    "refuses_stored",
]

#: elements of a key or a value; `kGreatestHead` of csrc/torch/attend.cpp
GREATEST_HEAD = 1024
#: `kGreatestOrder` of csrc/cpu/hadamard/hadamard.h
GREATEST_ORDER = 1024
#: where keys keep what the op is told of them and of values, among what tensors remember
_KEY = "ao_kernels.cpu.attend"


def attend(
    q: Tensor,
    key: QTensor,
    value: QTensor,
    counts: Tensor,
    tail_key: Tensor | None,
    tail_value: Tensor | None,
    center: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    sinks: Tensor | None,
    attention: Attention,
) -> Tensor:
    """Codes meet the queries as they are, a tile of tokens at a time, in one call into C++."""
    found: tuple[QTensor, Callable[..., Tensor]] | None = key._bound.get(_KEY)
    if found is None or found[0] is not value:
        found = key._bound[_KEY] = (value, _bound(key, value))
    if sinks is not None and sinks.dtype != torch.float32:
        sinks = sinks.float()
    try:
        return found[1](
            q, counts, tail_key, tail_value, center, start, stop, sinks,
            attention.scale, attention.causal, attention.window, attention.softcap,
        )  # fmt: skip
    except (
        RuntimeError
    ) as error:  # of all arguments, only the values of `counts` have not been checked before
        text = str(error).partition("\n")[0]
        if text.startswith("counts="):
            raise ConfigError(text) from error
        raise


def _bound(key: QTensor, value: QTensor) -> Callable[..., Tensor]:
    """The op with one pair of keys and values. Their memory is written to, but never replaced."""
    op = torch.ops.ao_kernels.attend.default
    keys, key_block = arguments_of(key)
    values, value_block = arguments_of(value)
    blocks, value_dim = [*key_block, *value_block], value.shape[3]

    def bound(q: Tensor, *others: Any) -> Tensor:
        return op(q, *keys, *values, blocks, value_dim, *others)  # type: ignore[no-any-return]

    return bound


def arguments_of(x: QTensor) -> tuple[tuple[Any, ...], tuple[int, int, bool]]:
    """Parts, values of codes and the rotation; tokens and elements of a block, whether codes are packed."""
    spec, parts, fmt = x.spec, x.parts, format_of(x.format)
    assert not isinstance(fmt, str)  # `refuses` has asked
    # order 1 for no transform: programs of AOTInductor pass no empty lists
    factors = [factor for step in spec.input for factor in hadamard_factors(step.block)]
    block = full_block(spec.block, x.stored_shape)
    codes = parts["qdata"].view(torch.uint8)
    arguments = (codes, parts["scale"], parts.get("zero_point"), fmt.table, factors or [1])
    return arguments, (block[2], block[3], spec.layout == "packed")


def _refuses(call: AttendCall) -> str | None:
    if call.dtype not in ELEMENTS:
        return f"reads float32, bfloat16 and float16, not {call.dtype}"
    if max(call.key_shape[3], call.value_dim) > GREATEST_HEAD:
        sizes = f"{call.key_shape[3]} and {call.value_dim}"
        return f"takes heads of {GREATEST_HEAD} elements at most, found {sizes}"
    if 0 in call.key_shape:
        return f"needs memory for keys, found {call.key_shape}"
    shapes = (call.key_shape, (*call.key_shape[:3], call.value_dim))
    for name, spec, shape in zip(("keys", "values"), call.specs, shapes, strict=True):
        if reason := refuses_stored(spec, shape):
            return f"of {name}: {reason}"
    return None


def refuses_stored(spec: Spec, shape: tuple[int, ...]) -> str | None:
    """Why the C++ code cannot read keys or values of this format and shape; None: it can."""
    if spec.layout not in ("plain", "packed"):
        return f"reads the layouts plain and packed, not {spec.layout}"
    if spec.scale_dtype not in ("float32", "bfloat16", "float16", "e8m0", "e4m3"):
        return f"needs scales that are numbers, found {spec.scale_dtype}"
    if spec.zero_point == "offset":
        return "takes zero points off before scaling, and this format has offsets"
    if full_block(spec.block, shape)[:2] != (1, 1):
        return f"needs scales of one head each, found blocks of {spec.block}"
    if reason := refuses_steps(spec):
        return reason
    dtype = registry.dtypes.get(spec.dtype)
    if dtype.bits > 8 or dtype.kind in ("codebook", "dense"):
        return f"needs codes of up to 8 bits with values of their own, and {dtype.name} has none"
    if reason := unavailable():  # the library is asked how it encodes
        return reason
    fmt = format_of(dtype)
    return fmt if isinstance(fmt, str) else None


def refuses_steps(spec: Spec) -> str | None:
    """Why the C++ code cannot take the input steps of this format; None: it can."""
    if len(spec.input) > 1 or any(step.kind != "hadamard" for step in spec.input):
        return f"takes one Hadamard transform, found {' and '.join(map(str, spec.input))}"
    for step in spec.input:
        *paley, _ = hadamard_factors(step.block)
        if paley and paley[0] > GREATEST_ORDER:
            return f"multiplies by matrices of order {GREATEST_ORDER} at most, found {paley[0]}"
    return None


def _describe(call: AttendCall) -> str:
    group = call.q_shape[1] // call.key_shape[1]
    return f"{isa()}, {group} heads of queries for each read of keys and values"


ATTEND_KERNELS = tuple(
    Kernel(
        f"cpu_attend_{layout}", "attend", layout, "cpu", attend, 50, unavailable, _refuses, _describe,
        fuses=("hadamard",), alone=want_alone,
    )
    for layout in ("plain", "packed")
)  # fmt: skip
