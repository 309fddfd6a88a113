"""Scales of scales and offset zero points in tiles: blocks of GGUF, double quantization, others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, Call, QTensor, Spec, explain, quantize_tensor
from ao_core.ext import fake_quantize, registry, repack, to_layout
from ao_core.ext.kernels import select
from ao_core.testing.layout_values import same_parts

ROW = (1, WHOLE)


def nested(dtype: str, *block: int, scale: str = "float16", layout: str = "packed") -> Spec:
    return Spec(dtype, block, scale, layout=layout)


GGUF = {
    "q4_0": Spec("int4", (1, 32), "float16"),
    "q4_1": Spec("uint4", (1, 32), "float16", "offset"),
    "q5_1": Spec("uint5", (1, 32), "float16", "offset"),
    "q2_k": Spec("uint2", (1, 16), nested("uint4", 1, 16), "offset"),
    "q3_k": Spec("int3", (1, 16), nested("int6", 1, 16)),
    "q4_k": Spec("uint4", (1, 32), nested("uint6", 1, 8), "offset"),
    "q5_k": Spec("uint5", (1, 32), nested("uint6", 1, 8), "offset"),
    "q6_k": Spec("int6", (1, 16), nested("int8", 1, 16, layout="plain")),
}
OTHERS = {
    "double int8": Spec("nf4", (1, 32), nested("int8", 2, 4, scale="bfloat16", layout="plain")),
    "double e4m3": Spec("int4", (1, 32), Spec("f8e4m3", (1, 3), "e8m0"), "offset"),
    "packed e4m3": Spec("int4", (1, 32), nested("f8e4m3", 1, 5, scale="float32"), "int"),
    "double row": Spec("f6e3m2", (1, 32), nested("uint5", 1, WHOLE, scale="float32")),
    "of all": Spec("uint3", (1, 32), nested("int7", WHOLE, WHOLE, scale="float32"), "float"),
    "blocks": Spec("int4", (3, 32), nested("uint5", 4, 2), "offset"),
    "codebook": Spec("nf4", (1, 32), "bfloat16", "offset"),
    "powers of two": Spec("uint4", (1, 32), "e8m0", "offset"),
    "e4m3": Spec("uint6", (1, 48), "e4m3", "offset"),
    "bytes": Spec("uint8", (1, 32), "float32", "offset"),
    "bytes, nested": Spec("int8", (1, 32), nested("int8", 1, 4, layout="plain"), "offset"),
}
SPECS = GGUF | OTHERS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def any_signs(part: Tensor) -> None:
    """Signed scales, as files hold them and quantization never makes them, in half of the places."""
    if isinstance(part, QTensor):
        if part.format.kind == "float":  # a sign bit
            part.qdata.view(torch.uint8).view(-1)[::2] ^= 0x80
        part = part.scale
    if part.dtype in DTYPES:
        part.view(-1)[::2] *= -1


def canonical(spec: Spec, *shape: int) -> QTensor:
    """Gaussian values off center in the canonical layout, with scales of both signs."""
    whole = registry.dtypes.get(spec.dtype).bits == 8
    q = quantize_tensor(randn(*shape) + 0.3, replace(spec, layout="plain" if whole else "packed"))
    any_signs(q.scale)
    if spec.zero_point == "offset":
        any_signs(q.zero_point)
    return q


def tiled(spec: Spec, *shape: int) -> tuple[QTensor, Tensor]:
    """A weight as `quantize_` would choose to hold it, which is in tiles, and its exact values."""
    q = canonical(spec, *shape)
    w = repack(q)
    assert w.spec.layout.startswith("cpu_tiles")
    return w, q.dequantize(torch.float32).double()


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", [(33, 280), (1, 1), (17, 500), (3, 18, 120)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_parts_and_values_come_back(name: str, shape: tuple[int, ...]) -> None:
    q = canonical(SPECS[name], *shape)
    whole = q.spec.layout == "plain"
    w = to_layout(q, "cpu_tiles8" if whole else "cpu_tiles")
    assert same_parts(w.canonical(), q)
    for dtype in (*DTYPES, torch.float64):
        assert torch.equal(w.dequantize(dtype), q.dequantize(dtype))


def test_parts_one_by_one() -> None:
    """Of row 18, group 9 of a q4_k weight: what the definition of the layout says where they are."""
    q = canonical(GGUF["q4_k"], 20, 512)
    w = to_layout(q, "cpu_tiles")
    scales, zeros = q.scale, q.zero_point
    codes = scales.dequantize(torch.float32) / scales.scale.float().repeat_interleave(8, 1)
    assert w.scale.dtype == torch.uint8
    assert float(w.scale[1, 9, 2]) == float(codes[18, 9])
    assert torch.equal(w.scale_outer[1, 1, 2], scales.scale[18, 1])
    assert torch.equal(w.offset_outer[1, 0, 3], zeros.scale[19, 0])
    assert not w.scale[1, :, 4:].any()
    signed = to_layout(canonical(GGUF["q3_k"], 20, 512), "cpu_tiles")
    assert (signed.scale.dtype, set(signed.part_names)) == (
        torch.int8,
        {"qdata", "table", "scale", "scale_outer"},
    )


def test_bytes_of_a_weight() -> None:
    """Scales and minima of a super-block take 8 bits each, where the canonical layout packs them."""
    for name, bits in (("q4_k", 4.625), ("q4_1", 5.0), ("q6_k", 6.5625), ("q3_k", 3.5625)):
        w, _ = tiled(GGUF[name], 64, 1024)
        stored = sum(part.nbytes for key, part in w.parts.items() if key != "table")
        assert stored * 8 == bits * 64 * 1024


@pytest.mark.parametrize("name", SPECS)
def test_matmuls(name: str) -> None:
    """As exact as float32 allows, and in 16 bits as the dense matmul of the values in 16 bits."""
    w, values = tiled(SPECS[name], 70, 520)
    for dtype in DTYPES:
        for m in (1, 2, 4, 5, 40):
            x, bias = randn(m, 520, seed=m).to(dtype), randn(70).to(dtype)
            call = Call("linear", w.spec, (70, 520), (m, 520), dtype, "cpu")
            assert select(call).name == f"{w.spec.layout}_linear"
            expected = F.linear(x.double(), values, bias.double())
            error = relative(F.linear(x, w, bias), expected)
            if dtype == torch.float32:
                assert error <= 1e-6, (m, error)
            else:
                slack = 1.05 if m * 70 >= 2048 else 1.5 if m == 1 else 1.2
                assert error <= slack * relative(F.linear(x, values.to(dtype), bias), expected), (
                    dtype,
                    m,
                )


@pytest.mark.parametrize(
    "act", [Spec("int8", ROW), Spec("uint8", ROW, zero_point="int"), Spec("f8e4m3", ROW)], ids=str
)
@pytest.mark.parametrize("name", ["q4_k", "q4_1", "q6_k", "q2_k", "bytes, nested", "blocks"])
def test_matmuls_of_quantized_activations(name: str, act: Spec) -> None:
    w, values = tiled(replace(SPECS[name], act=act), 40, 520)
    for m in (1, 3, 20):
        x = randn(m, 520) + 0.5
        seen = fake_quantize(x, act).double()
        assert relative(F.linear(x, w), seen @ values.t()) <= 1e-5


@pytest.mark.parametrize("name", ["q4_1", "q4_k", "q6_k", "double e4m3", "of all", "bytes, nested"])
def test_experts(name: str) -> None:
    w, values = tiled(SPECS[name], 3, 40, 520)
    ends, x = torch.tensor([2, 2, 7], dtype=torch.int32), randn(9, 520).bfloat16()
    with torch.no_grad():
        out = torch._grouped_mm(x, w.transpose(-2, -1), ends)
    experts = [0, 0, *(2 for _ in range(5))]
    expected = torch.stack([x[r].double() @ values[e].t() for r, e in enumerate(experts)])
    assert relative(out[:7], expected) < 2.0**-8
    assert torch.equal(w[2].dequantize(), values[2].float())


@pytest.mark.parametrize("name", SPECS)
def test_rows_of_embeddings(name: str) -> None:
    w, values = tiled(SPECS[name], 50, 130)
    ids = torch.tensor([[0, 49, 7], [16, 15, 7]])
    assert torch.equal(F.embedding(ids, w), values.float()[ids])


def test_long_rows() -> None:
    for name in ("q4_k", "q6_k", "q4_1"):
        w, values = tiled(GGUF[name], 32, 14336)
        for m in (1, 8):
            x = randn(m, 14336)
            assert relative(F.linear(x, w), x.double() @ values.t()) <= 1e-6


def test_explained() -> None:
    w, _ = tiled(GGUF["q4_k"], 48, 256)
    assert "→ cpu_tiles_linear (ao-kernels, priority 50)" in str(explain(w, torch.ones(1, 256)))


@pytest.mark.parametrize(
    "scale",
    [
        Spec("nf4", ROW),
        Spec("f8e5m2", ROW),
        Spec("ternary", ROW, layout="packed"),
        Spec("uint6", ROW, zero_point="int"),
        Spec("uint6", ROW, Spec("f8e4m3", ROW)),
        Spec("int8", (64,), layout="flat"),
    ],
    ids=str,
)
def test_refused_scales(scale: Spec) -> None:
    spec = Spec("int4", (1, 32), scale)
    reason = registry.layouts.get("cpu_tiles").refuses(spec, (16, 64), registry.dtypes.get("int4"))
    assert "quantized scales as integers or f8e4m3" in str(reason)
    assert str(scale) in str(reason)
