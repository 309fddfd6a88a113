"""Fake-quantize rules: formats that choose more than scales, learned scales and adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ao_core import DType, Spec
from ao_core.ext import ChosenSteps, QuantizationError, low_rank_step, registry
from ao_core.ext.compute import (
    FakeQuantize,
    Points,
    chosen_points,
    encoded,
    learned_by,
    register_fake_quantize,
    straight_through_by,
)
from ao_core.ext.numerics import block_absmax, block_minmax, block_sum, quant_max_of
from ao_quant.configs.gguf import GGUF_TYPES
from ao_quant.gguf.encode import encode

__all__ = ["CLIPPED", "LORA", "STRETCHED", "gguf_rule"]


def gguf_rule(kind: str) -> str:
    """The name of the rule by which weights in training are rounded to a GGUF type."""
    return f"gguf_{kind}"


def _apply_gguf(kind: str, values: Tensor, spec: Spec, extras: Mapping[str, Tensor]) -> Tensor:
    return straight_through_by(values, spec, partial(encode, kind))


for _kind in GGUF_TYPES:
    register_fake_quantize(FakeQuantize(gguf_rule(_kind), None, partial(_apply_gguf, _kind)))

# -- stretched elastic quantization ----------------------------------------------------------------

#: formats whose levels lie evenly around 0
_AROUND_ZERO = ("uint2", "ternary")
#: the part of the outermost bins in which values get a gradient
_BIN = 0.99
#: shares of the largest magnitude among which the first scale is searched
_SHARES = tuple(0.3 + 0.05 * step for step in range(15))


def _points(numbers: DType) -> Points:
    """Levels half steps from 0 where their number is even, and bins that are all of the same width."""
    half = (numbers.max - numbers.min) / 2
    zero = half if numbers.min == 0 else None
    return Points(zero, _BIN * (half + 0.5) - half)


def _initial_stretched(values: Tensor, spec: Spec) -> dict[str, Tensor]:
    is_even = spec.dtype == "uint2"
    if spec.dtype not in _AROUND_ZERO or (spec.zero_point == "float") != is_even:
        raise QuantizationError(
            f"scales='stretched' cannot serve {spec}: it has 3 or 4 levels evenly around 0; use "
            "BitNetWeightOnlyConfig(64) or UIntxWeightOnlyConfig(2, 64, zero_point='float')"
        )
    chosen_points(values, spec, "stretched")  # refuses other scales than plain ones
    numbers = registry.dtypes.get(spec.dtype)
    points = _points(numbers)
    greatest = block_absmax(values, spec.block).float() / ((numbers.max - numbers.min) / 2)
    least = torch.full_like(greatest, torch.inf)
    scale = torch.ones_like(greatest)
    for share in _SHARES:
        tried = torch.where(greatest > 0, greatest * share, 1.0)
        made = learned_by(values.detach(), tried, None, spec, points)
        error = block_sum((made.dequantize() - values).float().square(), spec.block)
        scale = torch.where(error < least, tried, scale)
        least = torch.minimum(error, least)
    return {"scale": scale.to(values.dtype)}


def _apply_stretched(values: Tensor, spec: Spec, extras: Mapping[str, Tensor]) -> Tensor:
    return learned_by(values, extras["scale"], None, spec, _points(registry.dtypes.get(spec.dtype)))


#: Stretched elastic quantization (SEQ, Liu et al. 2025, arXiv:2502.02631, equation 4): levels evenly around
#: 0, ±1/4 and ±3/4 of α at 2 bits and -2/3, 0 and 2/3 of it for ternary weights, whose bins all have the same
#: width. The extra tensor "scale" has the distance of two levels: α/2, and 2α/3. Weights get a gradient up to
#: .99 α, so that those beyond the outermost level learn, too. The first scale is the one of least squared
#: error.
STRETCHED = register_fake_quantize(FakeQuantize("stretched", _initial_stretched, _apply_stretched))

# -- learned clipping ------------------------------------------------------------------------------


def _initial_clipped(values: Tensor, spec: Spec) -> dict[str, Tensor]:
    scale, offset = chosen_points(values, spec, "clipped")
    ones = torch.ones_like(scale, dtype=values.dtype)
    if offset is None:
        return {"clip": ones}
    return {"clip_low": ones, "clip_high": ones.clone()}


def _apply_clipped(values: Tensor, spec: Spec, extras: Mapping[str, Tensor]) -> Tensor:
    numbers = registry.dtypes.get(spec.dtype)
    low, high = (ends.float() for ends in block_minmax(values.detach(), spec.block))
    if "clip" in extras:
        greatest = torch.maximum(high, -low)
        scale = extras["clip"].float() * greatest / quant_max_of(numbers, spec.block)
        return learned_by(values, torch.where(greatest > 0, scale, 1.0), None, spec)
    low = extras["clip_low"].float() * low.clamp(max=0)
    high = extras["clip_high"].float() * high.clamp(min=0)
    scale = (high - low) / (numbers.max - numbers.min)
    scale = torch.where(scale > 0, scale, 1.0)
    return learned_by(values, scale, low - numbers.min * scale, spec)


#: Learned clipping (Shao et al. 2023, arXiv:2308.13137, section 3.1): the range of a block, whose ends are
#: constants, times factors that are learned. The extra tensor "clip" is that of the largest magnitude; in
#: formats with zero points "clip_low" and "clip_high" are those of the least and the greatest value. They
#: start as 1, where the paper has the logistic function of 4. Scale and zero point follow and have the
#: gradients of LSQ+.
CLIPPED = register_fake_quantize(FakeQuantize("clipped", _initial_clipped, _apply_clipped))

# -- adapters --------------------------------------------------------------------------------------


def _adapters(values: Tensor, spec: Spec) -> dict[str, Tensor]:
    rank, (n, k) = int(spec.option("rank", 1)), values.shape
    if rank >= min(n, k):
        raise QuantizationError(f"rank={rank} is all of a matrix of {(n, k)}; use a smaller one")
    a = torch.empty(rank, k, device=values.device)
    if not values.is_meta:
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    return {"a": a, "b": torch.zeros(n, rank, device=values.device)}


def _factors(spec: Spec, extras: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """S B and A, with s = alpha / rank."""
    share = float(spec.option("alpha", 1.0)) / int(spec.option("rank", 1))
    return share * extras["b"], extras["a"]


def _apply_merged(values: Tensor, spec: Spec, extras: Mapping[str, Tensor]) -> Tensor:
    b, a = _factors(spec, extras)
    return straight_through_by((values + b @ a).to(values.dtype), spec)


class _Beside(torch.autograd.Function):
    """The stored weight with B A as a separate part, and the gradients of W + B A."""

    @staticmethod
    def forward(values: Tensor, b: Tensor, a: Tensor, spec: Spec) -> Tensor:
        steps = ChosenSteps((low_rank_step(b.shape[1]),), low_rank=(b.detach(), a.detach()))
        return steps.attached(encoded(values, spec))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, b, a, _ = inputs
        ctx.dtype = values.dtype
        ctx.save_for_backward(b, a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        b, a = ctx.saved_tensors
        wide = grad.to(a.dtype)
        return grad, wide @ a.t(), b.t() @ wide, None


def _apply_beside(values: Tensor, spec: Spec, extras: Mapping[str, Tensor]) -> Tensor:
    made: Tensor = _Beside.apply(values, *_factors(spec, extras), spec)  # type: ignore[no-untyped-call]
    return made


#: Adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) of a weight W that is not trained: the extra tensors "a"
#: (rank, K) and "b" (N, rank), with s = alpha / rank. "lora_base" stores W in its format and s B A
#: separately, in bfloat16; "lora_merged" stores W + s B A in the format. Both take the derivative of rounding
#: to be 1.
LORA = {
    "base": register_fake_quantize(
        FakeQuantize("lora_base", _adapters, _apply_beside, freezes=True)
    ),
    "merged": register_fake_quantize(
        FakeQuantize("lora_merged", _adapters, _apply_merged, freezes=True)
    ),
}
