"""The op quantize_rows: activations per token, as `fake_quantize` has them."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Spec
from ao_core.ext import registry
from ao_core.ext.kernels import encode_reference
from ao_core.ext.numerics import choose_qparams, quantize_affine
from ao_core.testing.base import same_bits
from ao_core.testing.kernel_codecs import contents
from ao_kernels.cpu.library import load

load()
ROW = (1, WHOLE)
ACTS = {1: ("int8", "none"), 2: ("uint8", "int"), 3: ("f8e4m3", "none"), 4: ("f8e5m2", "none")}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 4096), (5, 37), (33, 70), (2, 1), (2, 70_000)], ids=str)
def test_as_the_spec(act: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    name, zero_kind = ACTS[act]
    spec = Spec(name, ROW, zero_point=zero_kind)
    for kind in ("gaussian", "ties", "range"):
        x = contents(kind, spec, shape, dtype, seed=act)
        codes, scale, zero_point = torch.ops.ao_kernels.quantize_rows(x, act)
        expected = encode_reference(x, spec)
        assert same_bits(codes, expected["qdata"].view(torch.uint8))
        assert same_bits(scale, expected["scale"])
        if act == 2:
            assert same_bits(zero_point, expected["zero_point"])
        else:
            assert zero_point.numel() == 0


def test_rows_are_apart() -> None:
    """A row that is not finite spoils no other."""
    x = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    bad = x.clone()
    bad[1, 3], bad[2, 5] = torch.nan, torch.inf
    clean, dirty = (torch.ops.ao_kernels.quantize_rows(t, 1) for t in (x, bad))
    for a, b in zip(clean, dirty, strict=True):
        assert a.numel() == 0 or torch.equal(a[[0, 3]], b[[0, 3]])
    assert dirty[1][1].isnan()
    assert dirty[1][2].isfinite()


def test_strided_rows() -> None:
    x = torch.randn(64, 9, generator=torch.Generator().manual_seed(0)).t()
    dtype = registry.dtypes.get("int8")
    scale, _ = choose_qparams(x, dtype, ROW)
    codes, found, _ = torch.ops.ao_kernels.quantize_rows(x, 1)
    assert torch.equal(found, scale)
    assert torch.equal(codes, quantize_affine(x, dtype, ROW, scale))
