"""Small calls of the kernels for weights in planes, for known-answer tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import registry
from ao_core.ext.numerics import full_block
from ao_kernels.triton.shared.device import current_device, sm_count
from ao_kernels.triton.shared.known_answer import MATMUL, Sample, every_code, noise
from ao_kernels.triton.shared.tile_config import LaunchConfig
from ao_kernels.triton.shared.tiling import Tiling
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.launch import launch_config_of
from ao_kernels.triton.weight_only.layout import tiling
from ao_kernels.triton.weight_only.layout24 import Plane24
from ao_kernels.triton.weight_only.op_experts import launch_config_for

__all__ = [
    "config_of",
    "dequantize",
    "embedding",
    "grouped_linear",
    "is_sparse",
    "linear",
    "tiles_of",
]


def is_sparse(spec: Spec) -> bool:
    """Whether two of every four columns are kept."""
    return isinstance(registry.layouts.get(spec.layout), Plane24)


def tiles_of(call: Call) -> Tiling:
    """How the weight of a call is cut up."""
    n, k = call.weight_shape[-2:]
    fmt = known(registry.dtypes.get(call.spec.dtype), sparse=is_sparse(call.spec))
    return tiling(n, k, full_block(call.spec.block, call.weight_shape)[-1], fmt)


def config_of(call: Call) -> LaunchConfig:
    """How a call is launched on the current device."""
    tiles, m, sms = tiles_of(call), max(call.m, 1), sm_count(current_device())
    zero_point = call.spec.zero_point != "none"
    if len(call.weight_shape) == 3:
        return launch_config_for(tiles, m, call.weight_shape[0], sms, zero_point=zero_point)
    return launch_config_of(tiles, m, sms, zero_point=zero_point)


def linear(call: Call) -> Sample:
    """A tile of N, and of K as many as are split where those of the call are."""
    config, splits = config_of(call)
    spec, k = _small(call, 4 if splits > 1 else 2)
    m = min(max(call.m, 1), config.block_m)

    def arguments() -> tuple[object, ...]:
        x = noise((m, k), call.x_dtype)
        return x, every_code(spec, (config.block_n, k)), noise((config.block_n,), call.x_dtype)

    return Sample((repr(spec), call.x_dtype, config, splits > 1, k), arguments, MATMUL)


def grouped_linear(call: Call) -> Sample:
    """Two experts, and a row without one."""
    config, splits = config_of(call)
    spec, k = _small(call, 4 if splits > 1 else 2)
    m = min(-(-max(call.m, 1) // call.weight_shape[0]), config.block_m)

    def arguments() -> tuple[object, ...]:
        offs = torch.tensor([m, 2 * m], dtype=torch.int32)
        x = noise((2 * m + 1, k), call.x_dtype)
        return x, every_code(spec, (2, config.block_n, k)), offs

    return Sample((repr(spec), call.x_dtype, config, splits > 1, k), arguments, MATMUL)


def dequantize(call: Call) -> Sample:
    """Bit for bit."""
    spec, k = _small(call, 2)
    shape = (*((2,) if len(call.weight_shape) == 3 else ()), 128, k)

    def arguments() -> tuple[object, ...]:
        return every_code(spec, shape).parts, spec, shape, call.x_dtype

    return Sample((repr(spec), shape, call.x_dtype), arguments)


def embedding(call: Call) -> Sample:
    """Bit for bit."""
    spec, k = _small(call, 2)

    def arguments() -> tuple[object, ...]:
        ids = torch.arange(127, -1, -5).to(call.x_dtype)
        return ids, every_code(spec, (128, k))

    return Sample((repr(spec), call.x_dtype, k), arguments)


def _small(call: Call, k_tiles: int) -> tuple[Spec, int]:
    """The format of a weight of so many K tiles, and its K; ragged where the call's is."""
    tiles, k = tiles_of(call), call.weight_shape[-1]
    block = call.spec.block
    if full_block(block, call.weight_shape)[-1] >= k:
        block = (*block[:-1], WHOLE)
    ragged = 16 if k % tiles.width else 0
    return replace(call.spec, block=block), k_tiles * tiles.width - ragged
