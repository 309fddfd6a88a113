"""The kernel records of 2:4 sparsification."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Call, Kernel, Spec
from ao_core.ext import Parts, registry
from ao_kernels.masks import MaskCall
from ao_kernels.triton.shared.device import unavailable
from ao_kernels.triton.shared.known_answer import Sample, noise, proven
from ao_kernels.triton.sparsify.op import INPUTS, MASKED, sparsify24, tile_mask

__all__ = ["SPARSIFY_KERNELS"]


def quantize_two_four(x: Tensor, spec: Spec) -> Parts:
    """The parts of a tensor (…, K), as the reference gives them, but for the bits of NaN."""
    lead, k = x.shape[:-1], x.shape[-1]
    values, index = sparsify24(x.reshape(-1, k))
    return {"qdata": values.view(*lead, -1), "index": index.view(*lead, -1)}


def _refuses_quantize(call: Call) -> str | None:
    stored = registry.dtypes.get(call.spec.dtype).storage
    if stored not in INPUTS:
        return f"stores bfloat16 and float16, not {call.spec.dtype}"
    if call.x_dtype != stored:
        return (
            f"stores values in the dtype that they have, {call.x_dtype}, not as {call.spec.dtype}"
        )
    if 0 in call.x_shape:
        return f"is for tensors that are not empty, found shape {call.x_shape}"
    return None


def _refuses_tiles(call: MaskCall) -> str | None:
    if call.x_dtype not in MASKED:
        return f"reads bfloat16, float16 and float32, not {call.x_dtype}"
    if len(call.x_shape) != 2 or 0 in call.x_shape:
        return f"is for matrices that are not empty, found shape {call.x_shape}"
    return None


def _small(call: Call | MaskCall) -> tuple[int, int]:
    """More than a tile both ways, the last ones not full; only multiples of 4 are loaded 4 at a time."""
    return 37, 72 if call.x_shape[-1] % 4 == 0 else 70


def _sample(call: Call) -> Sample:
    shape = _small(call)
    assert call.x_dtype is not None
    dtype = call.x_dtype
    return Sample((repr(call.spec), dtype, shape), lambda: (noise(shape, dtype), call.spec))


def _mask_sample(call: MaskCall) -> Sample:
    """Of different powers of two, so that no two patterns of a tile have the same sum in any order."""
    shape, dtype = _small(call), call.x_dtype

    def arguments() -> tuple[Tensor]:
        tiles = noise((10, 18, 16))  # of 40 × 72
        powers = torch.exp2(tiles.argsort(-1) - 8.0).copysign(tiles)
        matrix = powers.view(10, 18, 4, 4).transpose(1, 2).reshape(40, 72)
        return (matrix[: shape[0], : shape[1]].to(dtype).contiguous(),)

    return Sample((dtype, shape), arguments)


SPARSIFY_KERNELS = (
    Kernel(
        "triton_quantize_two_four", "quantize", "two_four", "cuda", quantize_two_four, 50, unavailable,
        proven("quantize", quantize_two_four, _refuses_quantize, _sample),
    ),
    Kernel(
        "triton_tile_mask", "tile_mask", "two_four", "cuda", tile_mask, 50, unavailable,
        proven("tile_mask", tile_mask, _refuses_tiles, _mask_sample),
    ),
)  # fmt: skip
