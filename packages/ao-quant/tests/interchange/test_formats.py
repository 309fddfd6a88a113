"""Each format: values come back bit for bit, over bits, groups, odd sizes and permuted columns."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import PERMUTE, SCALE
from ao_core.ext.interchange import Interchange
from ao_quant.interchange.one import Stored, read_back
from ao_quant.interchange.records import INTERCHANGE
from ao_quant.interchange.verdicts import BYTES, REFUSED, VALUES

FORMATS = {form.name: form for form in INTERCHANGE}
NF4 = Spec("nf4", (1, 64), "float32", layout="packed")
FP8 = Spec("f8e4m3", (1, -1))
BLOCKS = Spec("f8e4m3", (128, 128))
MXFP4 = Spec("f4e2m1", (1, 32), "e8m0", layout="packed")
MXFP8 = Spec("f8e4m3", (1, 32), "e8m0")
NVFP4 = Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed")
Convert = Callable[[QTensor, Interchange], Stored]


@given(
    name=st.sampled_from(["gptq_v2", "compressed-tensors", "hqq", "torchao"]),
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    group=st.sampled_from([16, 32, 128]),
    rows=st.integers(1, 40),
    groups=st.integers(1, 3),
)
def test_integers_of_any_shape_keep_their_values(
    name: str,
    bits: int,
    symmetric: bool,
    group: int,
    rows: int,
    groups: int,
    convert: Convert,
    integers,
) -> None:
    tensor = integers(bits, symmetric, group, (rows, group * groups))
    assert convert(tensor, FORMATS[name]).verdict.verdict in (BYTES, VALUES)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from(["int2", "uint3", "int4", "uint4", "int8", "nf4", "f8e4m3"]),
    scale=st.sampled_from(["float16", "bfloat16", "float32"]),
    group=st.sampled_from([16, 32, 64, -1]),
    rows=st.integers(1, 40),
    columns=st.sampled_from([32, 64, 96, 160, 256]),
)
def test_a_verdict_is_what_the_reader_of_the_format_finds(
    name: str, dtype: str, scale: str, group: int, rows: int, columns: int, convert: Convert
) -> None:
    if group > 0 and columns % group:
        group = 32
    zero = "int" if dtype.startswith("uint") else "none"
    layout = "plain" if "8" in dtype else "packed"
    tensor = quantize_tensor(
        torch.randn(rows, columns).half(), Spec(dtype, (1, group), scale, zero, layout)
    )
    stored = convert(tensor, FORMATS[name])
    verdict = stored.verdict
    if verdict.verdict == REFUSED:
        assert verdict.reason
        return
    back = read_back(FORMATS[name], "m.weight", stored.tensors, stored.settings or {}, tensor)
    values, found = (each.dequantize(torch.float32).double() for each in (tensor, back))
    assert torch.equal(values, found) == (verdict.verdict in (BYTES, VALUES))
    change = (found - values).square().sum()
    assert verdict.max_error == pytest.approx(float((found - values).abs().max()), rel=1e-5)
    if change:
        expected = 10 * math.log10(float(values.square().sum() / change))
        assert verdict.sqnr == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("awq", Spec("uint4", (1, 64), "float16", "int", "packed")),
        ("awq_gemv", Spec("uint4", (1, 64), "float16", "int", "packed")),
        ("awq_gemv_fast", Spec("int4", (1, 64), "float16", layout="packed")),
        ("auto-round", Spec("int4", (1, 64), "float16", layout="packed")),
        ("mlx", Spec("int4", (1, 64), "float16", layout="packed")),
        ("mlx", MXFP4),
        ("mlx", MXFP8),
        ("bitsandbytes", NF4),
        ("bitsandbytes", Spec("bnb_fp4", (64,), "float32", layout="flat")),
        (
            "bitsandbytes",
            Spec(
                "nf4", (64,), Spec("bnb_map8", (256,), "float32", "offset", "flat"), layout="flat"
            ),
        ),
        ("modelopt", Spec("int4", (1, 64), "float16", layout="packed")),
        ("modelopt", NVFP4),
        ("modelopt", FP8),
        ("compressed-tensors", FP8),
        ("compressed-tensors", BLOCKS),
        ("compressed-tensors", MXFP4),
        ("compressed-tensors", MXFP8),
        ("fp8", BLOCKS),
        ("fbgemm_fp8", FP8),
        ("torchao", FP8),
    ],
    ids=str,
)
def test_a_format_keeps_what_it_can_hold(name: str, spec: Spec, convert: Convert) -> None:
    tensor = quantize_tensor(torch.randn(64, 256), spec)
    assert convert(tensor, FORMATS[name]).verdict.verdict in (BYTES, VALUES)


@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "compressed-tensors"])
def test_permuted_columns_are_a_step_of_the_input(name: str, convert: Convert) -> None:
    spec = Spec("uint4", (1, 32), "float16", "int", "packed", input=(PERMUTE,))
    tensor = quantize_tensor(torch.randn(16, 96), spec, in_perm=torch.randperm(96))
    stored = convert(tensor, FORMATS[name])
    assert stored.verdict.verdict in (BYTES, VALUES)
    assert "permute" in stored.verdict.target


def test_scales_of_inputs_are_a_step_of_the_input(convert: Convert) -> None:
    spec = Spec("int4", (1, 32), "float32", layout="packed", input=(SCALE,))
    tensor = quantize_tensor(torch.randn(16, 96), spec, in_scale=torch.rand(96) + 0.5)
    assert convert(tensor, FORMATS["modelopt"]).verdict.verdict == BYTES


def test_experts_of_gpt_oss_are_transposed(convert: Convert) -> None:
    tensor = quantize_tensor(torch.randn(3, 8, 64), MXFP4).transpose(1, 2)
    stored = convert(tensor, FORMATS["mxfp4"])  # type: ignore[arg-type]
    assert stored.verdict.verdict == BYTES
    assert stored.tensors["m.weight_blocks"].shape == (3, 8, 2, 16)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_other_values_are_put_on_the_nearest_grid_or_refused(name: str, convert: Convert) -> None:
    tensor = quantize_tensor(
        torch.randn(64, 128), Spec("codebook4", (1, 128), "float16", layout="packed")
    )
    verdict = convert(tensor, FORMATS[name]).verdict
    if verdict.verdict == REFUSED:
        assert name == "mxfp4"
        assert "experts" in verdict.reason
    else:
        assert verdict.sqnr is not None
        assert 15 < verdict.sqnr < 60
        assert 0 < verdict.max_error < 1


def test_version_1_of_gptq_has_no_zero_point_of_0(convert: Convert) -> None:
    spec = Spec("uint4", (1, 64), "float16", "int", "packed")
    tensor = quantize_tensor(torch.rand(8, 64) + 0.1, spec)
    assert bool((tensor.zero_point == 0).all())
    one, two = (convert(tensor, FORMATS[name]).verdict for name in ("gptq", "gptq_v2"))
    assert two.verdict == BYTES
    assert one.verdict == "re-gridded"
    assert "zero point of 0" in one.reason
    assert one.max_error < 0.1
