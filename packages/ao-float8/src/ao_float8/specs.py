"""From a configuration to the three matmuls of a `ComputeWeight`."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch

from ao_core import Config, Spec
from ao_core.ext import ROW, TENSOR
from ao_core.ext.compute import Matmuls, straight_through, with_float8_all_gather
from ao_float8.config import Float8LinearConfig, Float8Matmul
from ao_float8.training import (
    BitNetTrainingConfig,
    Int8MixedPrecisionTrainingConfig,
    MXTrainingConfig,
    NVFP4TrainingConfig,
)

__all__ = ["matmuls_of"]

_SQUARE = (128, 128)
#: granularity -> block of activations and gradients
_BLOCKS = {"tensor": TENSOR, "row": ROW, "block": (1, 128), "mx": (1, 32)}
#: scales round up to a power of two: nothing saturates
_UP = (("mx_mode", "rceil"),)
_MX = {"e2m1": "f4e2m1", "e2m3": "f6e2m3", "e3m2": "f6e3m2", "e4m3": "f8e4m3", "e5m2": "f8e5m2"}


@singledispatch
def matmuls_of(config: Config) -> Matmuls:
    """How each matmul is cast."""
    raise TypeError(f"{type(config).__name__} computes no matmuls in low precision")


@matmuls_of.register
def _(config: Float8LinearConfig) -> Matmuls:
    def spec(matmul: Float8Matmul | None, *, b_is_weight: bool) -> Spec | None:
        if matmul is None:
            return None
        powers = config.power_of_two_scales or matmul.granularity == "mx"
        scale, options = ("e8m0", _UP) if powers else ("float32", ())
        block = _BLOCKS[matmul.granularity]
        a = Spec(f"f8{matmul.a}", block, scale, options=options)
        square = b_is_weight and matmul.granularity == "block"
        accumulation = () if matmul.fast_accumulation else (("fast_accum", False),)
        return Spec(
            f"f8{matmul.b}",
            _SQUARE if square else block,
            scale,
            act=a,
            options=(*accumulation, *options),
        )

    matmuls = Matmuls(
        spec(config.output, b_is_weight=True),
        spec(config.grad_input, b_is_weight=True),
        spec(config.grad_weight, b_is_weight=False),
    )
    return with_float8_all_gather(matmuls) if config.enable_fsdp_float8_all_gather else matmuls


@matmuls_of.register
def _(config: Int8MixedPrecisionTrainingConfig) -> Matmuls:
    spec = Spec("int8", ROW, act=Spec("int8", ROW))
    return Matmuls(
        spec if config.output else None,
        spec if config.grad_input else None,
        spec if config.grad_weight else None,
    )


@matmuls_of.register
def _(config: BitNetTrainingConfig) -> Matmuls:
    weight = Spec("ternary", TENSOR, options=(("scale_rule", "absmean"),))
    return straight_through(weight, Spec("int8", ROW, options=(("scale_rule", "greatest"),)))


@matmuls_of.register
def _(config: MXTrainingConfig) -> Matmuls:
    element = Spec(_MX[config.dtype], (1, 32), "e8m0", options=_UP)
    backward = replace(element, act=replace(element, dtype=_MX[config.grad_dtype]))
    return Matmuls(replace(element, act=element), backward, backward)


@matmuls_of.register
def _(config: NVFP4TrainingConfig) -> Matmuls:
    element = Spec("f4e2m1", (1, 16), Spec("f8e4m3", TENSOR))
    spec = replace(element, act=element)
    return Matmuls(spec, spec, spec) if config.backward else Matmuls(spec)
