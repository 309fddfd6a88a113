"""Contenders of ao: a linear layer's matmul with each weight format, by whichever kernel serves it."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from rotation import Contender, Maker, copies, matmul, shifted
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ao_core import WHOLE, Call, Spec, quantize_tensor
from ao_core.ext import repack
from ao_core.ext.kernels import select

ROW = (1, WHOLE)
#: activations per token: symmetric, and with a zero point
INT8, UINT8 = Spec("int8", ROW), Spec("uint8", ROW, zero_point="int")
#: scales of scales: one for the whole weight
DOUBLE = Spec("f8e4m3", (WHOLE, WHOLE))


def _packed(dtype: str, group: int, scale: str | Spec = "bfloat16", **fields: object) -> Spec:
    return Spec(dtype, (1, group), scale, layout="packed", **fields)  # type: ignore[arg-type]


def _super(dtype: str, group: int, scale: str, count: int, **fields: object) -> Spec:
    """A super-block of GGUF: scales in integers, `count` of which share one in float16."""
    layout = "plain" if scale == "int8" else "packed"
    return _packed(dtype, group, Spec(scale, (1, count), "float16", layout=layout), **fields)


#: name -> format, as the recipes choose them
FORMATS: dict[str, Spec] = {
    "int8": Spec("int8", ROW, "bfloat16"),
    "int8 g128": Spec("int8", (1, 128), "bfloat16"),
    "int4 g32": _packed("int4", 32),
    "int4 g128": _packed("int4", 128),
    "uint4 g32": _packed("uint4", 32, zero_point="int"),
    "uint4 g128": _packed("uint4", 128, zero_point="int"),
    "nf4": _packed("nf4", 64, "float32"),
    "nf4 double": _packed("nf4", 64, DOUBLE),
    "mxfp4": _packed("f4e2m1", 32, "e8m0"),
    "nvfp4": _packed("f4e2m1", 16, DOUBLE),
    "fp8 e4m3": Spec("f8e4m3", ROW),
    "fp8 e5m2": Spec("f8e5m2", ROW),
    "mxfp8": Spec("f8e4m3", (1, 32), "e8m0"),
    "fp6 e3m2": _packed("f6e3m2", 32, "e8m0"),
    "fp6 e2m3": _packed("f6e2m3", 32, "e8m0"),
    "uint3 g32": _packed("uint3", 32, zero_point="int"),
    "int3 g128": _packed("int3", 128),
    "uint2 g32": _packed("uint2", 32, zero_point="int"),
    "ternary g128": _packed("ternary", 128),
    "q2_k": _super("uint2", 16, "uint4", 16, zero_point="offset"),
    "q3_k": _super("int3", 16, "int6", 16),
    "q4_k": _super("uint4", 32, "uint6", 8, zero_point="offset"),
    "q5_k": _super("uint5", 32, "uint6", 8, zero_point="offset"),
    "q6_k": _super("int6", 16, "int8", 16),
    "int8 dynamic": Spec("int8", ROW, "bfloat16", act=INT8),
    "int8 dynamic asym": Spec("int8", ROW, "bfloat16", act=UINT8),
    "int4 g32 dynamic": _packed("int4", 32, act=UINT8),
    "int4 g128 dynamic": _packed("int4", 128, act=UINT8),
    "uint4 g32 dynamic": _packed("uint4", 32, zero_point="int", act=UINT8),
    "fp8 dynamic": Spec("f8e4m3", ROW, act=Spec("f8e4m3", ROW)),
}
#: dtype of the activations -> its short name, and the formats that are timed with it
DTYPES: dict[torch.dtype, tuple[str, tuple[str, ...]]] = {
    torch.bfloat16: ("bf16", tuple(FORMATS)),
    torch.float32: (
        "fp32",
        ("int8", "int4 g32", "int4 g128", "nf4", "fp8 e4m3", "int8 dynamic", "int4 g32 dynamic"),
    ),
    torch.float16: ("fp16", ("int4 g32",)),
}


def name_of(fmt: str, dtype: torch.dtype = torch.bfloat16) -> str:
    """Name of the contender: the format, then the dtype of the activations."""
    return f"ao {fmt}, {DTYPES[dtype][0]}"


def ours() -> dict[str, Maker]:
    """Name -> what makes the contender for a weight."""
    return {
        name_of(fmt, dtype): partial(quantized_linear, fmt=fmt, dtype=dtype)
        for dtype, (_, formats) in DTYPES.items()
        for fmt in formats
    }


def quantized_linear(weight: Tensor, fmt: str, dtype: torch.dtype) -> Contender:
    """`F.linear` with a weight that is quantized, and arranged for this machine."""
    canonical = quantize_tensor(weight.to(dtype), FORMATS[fmt])
    first = repack(canonical)  # as `quantize_` does
    nbytes = stored(first)
    call = Call("linear", first.spec, tuple(first.shape), (1, weight.shape[1]), dtype, "cpu")
    weights = [repack(shifted(canonical, number)) for number in copies(nbytes)]
    return matmul(
        name_of(fmt, dtype),
        weights,
        nbytes,
        F.linear,
        weight.shape[1],
        dtype=dtype,
        kernel=select(call).name,
        memory=[each.parts["qdata"] for each in weights],
    )


def stored(tensor: Tensor) -> int:
    """Bytes that a tensor, ours or another's subclass, holds in all its parts."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(stored(getattr(tensor, name)) for name in names)
    return tensor.nbytes
