"""The conformance suites over what ao-kernels has for the layouts of ao-sparsity on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ao_core import WHOLE, Call, QTensor, Spec, quantize_tensor
from ao_core.ext import NO_SCALE, repack
from ao_core.ext.kernels import select
from ao_core.testing import KernelSuite, LayoutSuite

ROW = (1, WHOLE)
INT8 = Spec("int8", ROW)
SIDE = (("blocksize", 16),)
BLOCK_SPECS = (
    *(Spec(name, ROW, NO_SCALE, options=SIDE) for name in ("fp32", "bf16", "fp16")),
    Spec("int8", ROW, "bfloat16", options=SIDE),
    Spec("int8", ROW, act=INT8, options=SIDE),
)
FOUR_SPECS = (
    *(Spec(name, ROW, NO_SCALE) for name in ("fp32", "bf16", "fp16")),
    Spec("int8", ROW),
    Spec("int4", (1, 32), "bfloat16"),
)


class TestBlocks(LayoutSuite):
    layout = "bsr_cpu"
    specs = (BLOCK_SPECS[1], BLOCK_SPECS[3])


class TestBlockMatmul(KernelSuite):
    kernel = "bsr_cpu_linear"
    specs = BLOCK_SPECS


class TestTileMask(KernelSuite):
    kernel = "cpu_tile_mask"


class TestTwoFourMatmul(KernelSuite):
    kernel = "cpu_two_four_linear"
    specs = FOUR_SPECS


class TestTwoFourDequantize(KernelSuite):
    kernel = "cpu_dequantize_two_four"
    specs = (*FOUR_SPECS, Spec("f8e4m3", ROW), Spec("nf4", (1, 64), "bfloat16"))


@pytest.mark.parametrize("spec", BLOCK_SPECS, ids=str)
def test_a_model_takes_the_native_layout(spec: Spec) -> None:
    """Blocks of zeros are left out of it, and the matmul is that of the canonical layout."""
    dense = torch.randn(80, 100, generator=torch.Generator().manual_seed(1))
    dense[16:64] = 0
    canonical = quantize_tensor(
        dense,
        Spec(spec.dtype, spec.block, spec.scale_dtype, layout="bsr", act=spec.act, options=SIDE),
    )
    found = repack(canonical)
    assert isinstance(found, QTensor)
    assert found.spec.layout == "bsr_cpu"
    assert found.parts["qdata"].shape[0] == 2 * 7
    x = torch.randn(9, 100, generator=torch.Generator().manual_seed(2))
    expected = F.linear(x.double(), canonical.dequantize(torch.float32).double())
    bound = 1e-6 if spec.act is None else 2e-2
    assert (F.linear(x, found).double() - expected).norm() <= bound * expected.norm()
    assert torch.equal(found.canonical().qdata, canonical.qdata)


def test_more_rows_of_two_of_four_are_multiplied_densely() -> None:
    layer = nn.Linear(64, 48)
    w = quantize_tensor(layer.weight, Spec("bf16", ROW, NO_SCALE, layout="two_four"))
    for m, kernel in (
        (1, "cpu_two_four_linear"),
        (24, "cpu_two_four_linear"),
        (25, "reference_linear"),
    ):
        x = torch.randn(m, 64)
        call = Call("linear", w.spec, (48, 64), (m, 64), x.dtype, "cpu")
        assert select(call).name == kernel
        expected = x.double() @ w.dequantize(torch.float32).double().T
        assert (F.linear(x, w).double() - expected).norm() <= 1e-6 * expected.norm()
