"""Learned codebooks in every layout and every cut, and what they are worth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import WHOLE, Spec, load_model, quantize_, quantize_tensor, save_model
from ao_core.ext import QuantizationError, registry
from ao_core.testing import LayoutSuite
from ao_quant import CodebookWeightOnlyConfig

SPECS = (
    Spec("codebook3", (1, WHOLE), "bfloat16"),
    Spec("codebook2", (4, 16)),
    Spec("codebook4", (WHOLE, WHOLE)),
    Spec("codebook5", (64,), "float16"),
)


class TestPacked(LayoutSuite):
    layout = "packed"
    specs = SPECS
    shapes = ((33, 70), (3, 8, 40))


class TestFlat(LayoutSuite):
    layout = "flat"
    specs = SPECS
    shapes = ((16, 64),)


@pytest.mark.parametrize(
    ("group", "tables", "storage"),
    [("tensor", (1, 1), "float32"), ("row", (48, 1), "bfloat16"), (128, (48, 3), "bfloat16")],
)
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_values_of_a_tensor_a_row_or_a_group(group, tables, storage, bits):
    x = torch.randn(48, 300)
    spec = CodebookWeightOnlyConfig(bits, group).spec(x.shape, x.dtype)
    assert (spec.dtype, spec.scale_dtype) == (f"codebook{bits}", storage)
    q = quantize_tensor(x, spec)
    assert q.scale.shape == (*tables, 1 << bits)
    blocks = q.dequantize().split(128 if group == 128 else 300, 1)
    for block in [blocks[0].flatten()] if group == "tensor" else [row for b in blocks for row in b]:
        assert len(block.unique()) <= 1 << bits


def test_better_than_any_fixed_format_of_as_many_bits(sqnr_db):
    torch.manual_seed(0)
    x = torch.distributions.StudentT(4.0).sample((64, 1024))  # heavier tails than normal
    for bits, others in ((4, ("int4", "nf4", "f4e2m1")), (3, ("int3", "f3e1m1"))):
        spec = CodebookWeightOnlyConfig(bits).spec(x.shape, x.dtype)
        learned = sqnr_db(x, quantize_tensor(x, spec).dequantize())
        fixed = [
            sqnr_db(x, quantize_tensor(x, Spec(name, (1, WHOLE), layout="packed")).dequantize())
            for name in others
        ]
        assert max(fixed) + 1 < learned < 6.02 * bits + 1


def test_no_kernel_takes_the_places_for_values():
    layer = nn.Linear(256, 64)
    quantize_(layer, "codebook_weight_only")
    (record,) = [r for r in quantize_(nn.Linear(256, 64), "codebook_weight_only") if r.spec]
    assert record.kernel == "reference_linear"
    for layout in registry.layouts.values():
        refuses = layout.refuses(layer.weight.spec, (64, 256), registry.dtypes.get("codebook4"))
        assert (refuses is None) == (layout.name in ("plain", "packed"))


def test_saved_and_loaded(tmp_path):
    def model():
        return nn.Sequential(nn.Linear(70, 33), nn.Conv2d(6, 8, 3))

    source, target = model(), model()
    quantize_(source, CodebookWeightOnlyConfig(3, 128))
    save_model(source, tmp_path / "model")
    load_model(target, tmp_path / "model")
    for old, new in zip(source.parameters(), target.parameters(), strict=True):
        dense = [p.dequantize() if hasattr(p, "dequantize") else p for p in (old, new)]
        assert torch.equal(*dense)


def test_zero_points_are_refused():
    with pytest.raises(
        (QuantizationError, ValueError), match="codebook4 has learned values in place"
    ):
        quantize_tensor(torch.randn(4, 64), Spec("codebook4", (1, 32), zero_point="float"))
