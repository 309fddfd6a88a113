"""The layout `bsr_cpu`, stored blocks as the C++ matmuls read them, and the kernel for it."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import WHOLE, Call, DType, Kernel, Layout, QTensor, Spec
from ao_core.ext import Parts, blocksize_of
from ao_core.ext.numerics import full_block
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.cpu.linear import refuses

__all__ = ["BLOCK_SPARSE_KERNELS", "BLOCK_SPARSE_LAYOUTS", "BsrCpu", "block_sparse_linear"]

#: columns whose values stand together, because one instruction multiplies them; by name of the format
TOGETHER = {"fp32": 1, "fp16": 1, "bf16": 2, "int8": 4}
#: dtypes of scales that the C++ code reads
SCALES = ("float32", "bfloat16", "float16")
#: rows and columns of the smallest block, of which others are multiples, and of the largest
LEAST, GREATEST = 16, 256
#: columns up to which sums of products of bytes fit 32 bits; as in C++
MOST_COLUMNS = 65536


class BsrCpu(Layout):
    """As `bsr`, but for the order of values in a block, of side b.

    - qdata: (nnz, b / t, b, t): t columns together, of all rows, then the next; t is 2 of bfloat16, 4 of
      int8, which are stored as uint8 with the top bit flipped, and 1 of others
    - col_indices, crow_indices, scale: as in `bsr`.
    """

    name = "bsr_cpu"
    canonical = False
    canonical_name = "bsr"
    auto_devices = ("cpu",)

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why the matmuls cannot take such a tensor."""
        if dtype.name not in TOGETHER:
            return f"holds {', '.join(TOGETHER)}, not {dtype.name}"
        if len(shape) != 2 or 0 in shape:
            return f"needs a weight of 2 dimensions that is not empty, found {shape}"
        side = blocksize_of(spec)
        if side % LEAST or not LEAST <= side <= GREATEST:
            return f"needs blocks of {LEAST}, {2 * LEAST}, … or {GREATEST} rows, found blocksize={side}"
        if spec.zero_point != "none":
            return f"has no zero points, and this format has zero_point={spec.zero_point!r}"
        if dtype.bits == 8 and (reason := _unfit_scale(spec, shape)):
            return reason
        return None if spec.act is None else _unfit_act(spec.act, shape, dtype)

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """Blocks in the order in which matmuls read them."""
        side, together = blocksize_of(spec), TOGETHER[dtype.name]
        codes = parts["qdata"].view(torch.uint8) ^ 128 if dtype.bits == 8 else parts["qdata"]
        blocks = codes.reshape(-1, side, side // together, together).transpose(1, 2)
        return {**parts, "qdata": blocks.contiguous()}

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Blocks as rows of columns again."""
        side = blocksize_of(spec)
        codes = parts["qdata"].transpose(1, 2).reshape(-1, side, side)
        codes = (codes ^ 128).view(dtype.storage) if dtype.bits == 8 else codes
        return {**parts, "qdata": codes.contiguous()}


BLOCK_SPARSE_LAYOUTS = (BsrCpu(),)


def _unfit_scale(spec: Spec, shape: tuple[int, ...]) -> str | None:
    """Why the matmuls cannot take such scales."""
    if spec.scale_dtype not in SCALES:
        return f"has scales in {', '.join(SCALES)}, not {spec.scale_dtype}"
    rows, columns = full_block(spec.block, shape)
    if columns < shape[1] or rows not in (1, shape[0]):
        return f"has one scale per row or one for all, found blocks of {spec.block}"
    return None


def _unfit_act(act: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
    """Why the matmuls cannot quantize activations like this."""
    if act.static or act != Spec("int8", act.block) or act.block not in ((1, WHOLE), (WHOLE,)):
        return (
            f"quantizes activations per token, at run time, to int8 with a float32 scale, not {act}"
        )
    if dtype.bits != 8:
        return f"multiplies quantized activations with int8, not {dtype.name}"
    if shape[1] > MOST_COLUMNS:
        return f"adds up products of at most {MOST_COLUMNS} bytes, found {shape[1]} columns"
    return None


def block_sparse_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """The matmul, with the blocks that are stored alone."""
    parts = w.parts
    out: Tensor = torch.ops.ao_kernels.block_sparse_linear(
        x, parts["qdata"], parts["col_indices"], parts["crow_indices"], parts.get("scale"), bias,
        w.stored_shape[0], int(w.spec.act is not None),
    )  # fmt: skip
    return out


def _describe(call: Call) -> str:
    act = "" if call.spec.act is None else f", activations as {call.spec.act.dtype} per token"
    return f"{isa()}, empty blocks skipped{act}"


BLOCK_SPARSE_KERNELS = (
    Kernel(
        "bsr_cpu_linear", "linear", "bsr_cpu", "cpu", block_sparse_linear, 50, unavailable,
        refuses("(N, K)"), _describe,
    ),
)  # fmt: skip
