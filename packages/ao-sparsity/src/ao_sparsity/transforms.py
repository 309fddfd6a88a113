"""The transforms of ao-sparsity: from a dense parameter to one in a sparse layout."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.records import Skip, Target, Transform
from ao_core.spec import WHOLE, Spec
from ao_core.tensor import QTensor
from ao_core.weights import WeightFormat, quantize_weight
from ao_sparsity import configs as c

__all__ = ["TRANSFORMS", "apply", "format_of"]

#: the format of values as they are, by their dtype; float64 is rounded, as all formats round it
_OWN = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_TOKEN = (1, WHOLE)


def _own(dtype: torch.dtype) -> str:
    return _OWN.get(dtype, "fp32")


@singledispatch
def format_of(config: Config, dtype: torch.dtype) -> WeightFormat:
    """The format that a configuration describes, of a weight in `dtype`."""
    raise ConfigError(f"config={config!r} is no configuration of ao-sparsity")


@format_of.register
def _(config: c.SemiSparseWeightConfig, dtype: torch.dtype) -> WeightFormat:
    return WeightFormat(_own(dtype), "row", "own", layout="two_four")


@format_of.register
def _(
    config: c.Int8DynamicActivationInt8SemiSparseWeightConfig, dtype: torch.dtype
) -> WeightFormat:
    return WeightFormat("int8", "row", "own", act=Spec("int8", _TOKEN), layout="two_four")


@format_of.register
def _(
    config: c.Float8DynamicActivationFloat8SemiSparseWeightConfig, dtype: torch.dtype
) -> WeightFormat:
    act = Spec("f8e4m3", _TOKEN)
    return WeightFormat("f8e4m3", "row", "float32", act=act, layout="two_four")


@format_of.register
def _(config: c.Int4WeightOnlySemiSparseConfig, dtype: torch.dtype) -> WeightFormat:
    return WeightFormat("int4", config.group_size, "bfloat16", layout="two_four")


@format_of.register
def _(config: c.BlockSparseWeightConfig, dtype: torch.dtype) -> WeightFormat:
    name = _own(dtype) if config.dtype == "own" else config.dtype
    options: dict[str, float] = {"blocksize": config.blocksize}
    if config.sparsity:
        options["sparsity"] = float(config.sparsity)
    return WeightFormat(name, "row", "own", layout="bsr", options=tuple(sorted(options.items())))


def apply(dense: Tensor, config: Config, target: Target) -> Tensor | Skip:
    """The sparse form of a parameter, or why there is none."""
    return quantize_weight(dense, format_of(config, dense.dtype), target)


def _apply_blocks(
    dense: Tensor, config: c.BlockSparseWeightConfig, target: Target
) -> Tensor | Skip:
    """The same, unless blocks would only add to what the weight takes."""
    new = apply(dense, config, target)
    if not isinstance(new, QTensor) or dense.is_meta:
        return new
    before = dense.numel() * dense.element_size()
    if new.stored_bytes < before:
        return new
    return Skip(
        f"in blocks of {config.blocksize} × {config.blocksize} it would take {new.stored_bytes} bytes, and "
        f"dense it takes {before}: {new.sparsity or 0:.0%} of its blocks are zeros. Prune it by blocks "
        "first, use smaller ones, or set sparsity"
    )


TRANSFORMS: tuple[Transform, ...] = (
    Transform(c.SemiSparseWeightConfig, "semi_sparse_weight", 1, apply),
    Transform(
        c.Int8DynamicActivationInt8SemiSparseWeightConfig,
        "int8_dynamic_activation_int8_semi_sparse_weight",
        1,
        apply,
    ),
    Transform(
        c.Float8DynamicActivationFloat8SemiSparseWeightConfig,
        "float8_dynamic_activation_float8_semi_sparse_weight",
        1,
        apply,
    ),
    Transform(c.Int4WeightOnlySemiSparseConfig, "int4_weight_only_semi_sparse", 1, apply),
    Transform(
        c.BlockSparseWeightConfig,
        "block_sparse_weight",
        1,
        _apply_blocks,
        example=c.BlockSparseWeightConfig(blocksize=8, sparsity=0.5),
    ),
)
