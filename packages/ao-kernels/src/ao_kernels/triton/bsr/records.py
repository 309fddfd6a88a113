"""The kernel records of matmuls with block-sparse weights."""

from __future__ import annotations

from torch import Tensor

from ao_core import Call, Kernel, QTensor
from ao_core.ext import blocksize_of, registry
from ao_kernels.triton.bsr.launch import bsr_linear, tile_config_of
from ao_kernels.triton.shared.device import unavailable
from ao_kernels.triton.shared.known_answer import MATMUL, Sample, every_code, noise, proven

__all__ = ["BSR_KERNELS", "linear"]


def linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """The matmul, in one launch."""
    parts, (n, k) = w.parts, w.stored_shape
    out: Tensor = bsr_linear(
        x,
        parts["qdata"],
        parts["col_indices"],
        parts["crow_indices"],
        parts["row_order"],
        bias,
        n,
        k,
    )
    return out


def _refuses(call: Call) -> str | None:
    stored = registry.dtypes.get(call.spec.dtype).storage
    if call.x_dtype != stored:
        return f"needs activations in the dtype of the weight, {stored}, found {call.x_dtype}"
    return None


def _describe(call: Call) -> str:
    config = tile_config_of(call.m, blocksize_of(call.spec), call.x_dtype)
    return f"tiles of {config.block_m} rows, sums in float32, empty blocks skipped, split-K by their number"


def _sample(call: Call) -> Sample:
    """Two rows of blocks, which are split."""
    side = blocksize_of(call.spec)
    m = min(max(call.m, 1), 128)

    def arguments() -> tuple[object, ...]:
        x, bias = noise((m, 2048), call.x_dtype), noise((2 * side,), call.x_dtype)
        return x, every_code(call.spec, (2 * side, 2048)), bias

    return Sample((repr(call.spec), call.x_dtype, m), arguments, MATMUL)


BSR_KERNELS = (
    Kernel(
        "triton_bsr_sorted_linear", "linear", "bsr_sorted", "cuda", linear, 50, unavailable,
        proven("linear", linear, _refuses, _sample), _describe,
    ),
)  # fmt: skip
