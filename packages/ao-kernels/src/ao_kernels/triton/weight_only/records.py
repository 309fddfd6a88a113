"""The kernels of `linear`, `grouped_linear`, `embedding` and `dequantize` for weights in planes."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Call, Kernel, QTensor, Spec
from ao_core.ext import Parts
from ao_core.ext.numerics import full_block
from ao_kernels.triton.shared.device import unavailable
from ao_kernels.triton.shared.dtypes import ELEMENTS
from ao_kernels.triton.shared.known_answer import proven
from ao_kernels.triton.shared.tile_config import described
from ao_kernels.triton.weight_only import samples
from ao_kernels.triton.weight_only.layout import LAYOUTS as DENSE_LAYOUTS
from ao_kernels.triton.weight_only.layout24 import Plane24
from ao_kernels.triton.weight_only.samples import config_of, is_sparse

__all__ = ["LAYOUTS", "PLANE16_KERNELS"]

LAYOUTS = (*DENSE_LAYOUTS, Plane24())

#: up to so many rows, decoding weights in every tile of rows is cheaper than once for all. By arithmetic, not
#: measured: at 128 rows a tile decodes in a fifth of the time of its products, which wait for that; decoding
#: once writes two bytes for each weight and reads them. With zero points tiles have 64 rows
MOST_ROWS = {"none": 512, "int": 128, "float": 128}


def plane16_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """Multiply by weights in planes, in one launch."""
    from ao_kernels.triton.weight_only import op

    n, k = w.stored_shape
    group = full_block(w.spec.block, (n, k))[-1]
    parts = w.parts
    out: Tensor = op.plane16_linear(
        x, parts["qdata"], parts["scale"], parts.get("zero_point"), parts["table"], bias,
        n, k, group, w.spec.dtype, is_sparse(w.spec), parts.get("global_scale"),
    )  # fmt: skip
    return out


def plane16_grouped_linear(x: Tensor, w: QTensor, offs: Tensor | None) -> Tensor:
    """`plane16_linear` for the rows of each expert, in one launch that does not wait to know them."""
    from ao_kernels.triton.weight_only.op_experts import ends_of, plane16_grouped_linear

    _, n, k = w.stored_shape
    group = full_block(w.spec.block, (n, k))[-1]
    parts = w.parts
    out: Tensor = plane16_grouped_linear(
        x.reshape(-1, k), parts["qdata"], parts["scale"], parts.get("zero_point"), parts["table"],
        ends_of(x, offs), n, k, group, w.spec.dtype, is_sparse(w.spec), parts.get("global_scale"),
    )  # fmt: skip
    return out.reshape(*x.shape[:-1], n)


def plane16_dequantize(
    parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Dense values of `shape`, bit for bit those of the canonical layout."""
    from ao_kernels.triton.weight_only import op

    n, k = shape[-2:]
    group = full_block(spec.block, shape)[-1]
    out: Tensor = op.plane16_dequantize(
        parts["qdata"], parts["scale"], parts.get("zero_point"), parts["table"],
        n, k, group, spec.dtype, dtype, is_sparse(spec), parts.get("global_scale"),
    )  # fmt: skip
    return out


def plane16_embedding(ids: Tensor, w: QTensor) -> Tensor:
    """Rows of a weight in planes, with the bits of its dense values."""
    from ao_kernels.triton.weight_only import op

    (n, k), parts = w.stored_shape, w.parts
    group = full_block(w.spec.block, (n, k))[-1]
    out: Tensor = op.plane16_embedding(
        ids, parts["qdata"], parts["scale"], parts.get("zero_point"), parts["table"],
        n, k, group, w.spec.dtype, w.dtype, is_sparse(w.spec), parts.get("global_scale"),
    )  # fmt: skip
    return out


def _refuses_embedding(call: Call) -> str | None:
    if call.x_dtype not in (torch.int32, torch.int64):
        return f"looks up by int32 and int64, not {call.x_dtype}"
    return None


def _refuses_linear(call: Call) -> str | None:
    return _refused(call, call.m, "rows")


def _refuses_grouped_linear(call: Call) -> str | None:
    return _refused(call, _rows_of_expert(call), "rows of an expert on average")


def _refused(call: Call, rows: int, what: str) -> str | None:
    if call.x_dtype not in ELEMENTS:
        return f"needs activations in bfloat16 or float16, found {call.x_dtype}"
    if rows > (most := MOST_ROWS[call.spec.zero_point]):
        return f"is for up to {most} {what}, found {rows}: decoding once is cheaper"
    return None


def _rows_of_expert(call: Call) -> int:
    """On average, rounded up."""
    return -(-call.m // call.weight_shape[0])


def _refuses_dequantize(call: Call) -> str | None:
    if call.x_dtype not in (*ELEMENTS, torch.float32):
        return f"writes float32, bfloat16 and float16, not {call.x_dtype}"
    return None


def _describe(call: Call) -> str:
    return f"{described(config_of(call))}, sums in float32"


def _describe_grouped(call: Call) -> str:
    return f"all experts in one launch, {_describe(call)}"


_linear = proven("linear", plane16_linear, _refuses_linear, samples.linear)
_grouped_linear = proven(
    "grouped_linear", plane16_grouped_linear, _refuses_grouped_linear, samples.grouped_linear
)
_embedding = proven("embedding", plane16_embedding, _refuses_embedding, samples.embedding)
_dequantize = proven("dequantize", plane16_dequantize, _refuses_dequantize, samples.dequantize)

PLANE16_KERNELS = (
    *(
        Kernel(
            f"triton_{layout.name}_linear", "linear", layout.name, "cuda", plane16_linear, 50,
            unavailable, _linear, _describe,
        )
        for layout in LAYOUTS
    ),
    *(
        Kernel(
            f"triton_{layout.name}_grouped_linear", "grouped_linear", layout.name, "cuda",
            plane16_grouped_linear, 50, unavailable, _grouped_linear, _describe_grouped,
        )
        for layout in LAYOUTS
    ),
    *(
        Kernel(
            f"triton_{layout.name}_embedding", "embedding", layout.name, "cuda",
            plane16_embedding, 50, unavailable, _embedding,
        )
        for layout in LAYOUTS
    ),
    *(
        Kernel(
            f"triton_{layout.name}_dequantize", "dequantize", layout.name, "cuda",
            plane16_dequantize, 50, unavailable, _dequantize,
        )
        for layout in LAYOUTS
    ),
)  # fmt: skip
