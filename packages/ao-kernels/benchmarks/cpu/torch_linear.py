"""Contenders of torch itself: dense matmuls, and its matmuls with low-bit weights on the CPU."""

from __future__ import annotations

import warnings
from functools import partial

import torch
import torch.nn.functional as F
from rotation import Contender, Maker, copies, matmul, rolled, shifted
from torch import Tensor

#: the dense matmul in each dtype
DENSE = {
    torch.bfloat16: "F.linear bf16",
    torch.float32: "F.linear fp32",
    torch.float16: "F.linear fp16",
}
warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")


def torch_linear() -> dict[str, Maker]:
    """Name -> what makes the contender for a weight."""
    makers: dict[str, Maker] = {
        name: partial(dense, dtype=dtype, name=name) for dtype, name in DENSE.items()
    }
    for group in (32, 128):
        name = f"torch int4pack g{group}, bf16"
        makers[name] = partial(int4pack, name=name, group=group, dtype=torch.bfloat16)
    name = "torch int4pack g32, fp32"
    makers[name] = partial(int4pack, name=name, group=32, dtype=torch.float32, most_rows=16)
    return makers | {
        "torch int8pack, bf16": int8pack,
        "torch _int_mm": int_mm,
        "quantize_dynamic x86, fp32": quantize_dynamic,
    }


def dense(weight: Tensor, *, dtype: torch.dtype, name: str) -> Contender:
    """`F.linear` with a dense weight."""
    weight = weight.to(dtype)
    rotated = [rolled(weight, number) for number in copies(weight.nbytes)]
    return matmul(name, rotated, weight.nbytes, F.linear, weight.shape[1], dtype=dtype)


def int4pack(
    weight: Tensor, *, name: str, group: int, dtype: torch.dtype, most_rows: int | None = None
) -> Contender:
    """4-bit codes in groups, with a scale and a float zero point each; random ones."""
    n, k = weight.shape

    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    qdata = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(k // group, n, 2).to(dtype)

    def multiply(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight[0], group, weight[1])

    nbytes = qdata.nbytes + scales.nbytes
    rotated = ((shifted(qdata, i), shifted(scales, i)) for i in copies(nbytes))
    return matmul(name, rotated, nbytes, multiply, k, dtype=dtype, most_rows=most_rows)


def int8pack(weight: Tensor) -> Contender:
    """int8 codes with one scale per row."""
    n, k = weight.shape
    scales = torch.rand(n, dtype=torch.bfloat16)

    def multiply(x: Tensor, codes: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, codes, scales)

    nbytes = n * k + scales.nbytes
    rotated = (_int8(n, k) for _ in copies(nbytes))
    return matmul("torch int8pack, bf16", rotated, nbytes, multiply, k)


def int_mm(weight: Tensor) -> Contender:
    """The bare matmul of int8 matrices, without scales or the quantization of x."""
    n, k = weight.shape

    def calls(m: int) -> list[partial[Tensor]]:
        x = _int8(m, k)
        return [partial(torch._int_mm, x, codes.t()) for codes in rotated]

    rotated = [_int8(n, k) for _ in copies(n * k)]
    return Contender("torch _int_mm", n * k, torch.int8, calls)


def quantize_dynamic(weight: Tensor) -> Contender:
    """What `torch.ao.quantization.quantize_dynamic` calls: int8 weights with one scale."""
    n, k = weight.shape
    torch.backends.quantized.engine = "x86"
    prepack, linear = torch.ops.quantized.linear_prepack, torch.ops.quantized.linear_dynamic
    scale = weight.abs().max().item() / 127

    def packed(number: int) -> object:
        codes = torch.quantize_per_tensor(rolled(weight, number), scale, 0, torch.qint8)
        return prepack(codes, None)

    def multiply(x: Tensor, weight: object) -> Tensor:
        return linear(x, weight, True)  # as torch.ao.nn.quantized.dynamic.Linear does

    rotated = (packed(number) for number in copies(n * k))
    return matmul("quantize_dynamic x86, fp32", rotated, n * k, multiply, k, dtype=torch.float32)


def _int8(*size: int) -> Tensor:
    return torch.randint(-128, 128, size, dtype=torch.int8)
