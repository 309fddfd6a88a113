"""What the comparison with llama.cpp takes for its kernels' inputs."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType, quants
from perplexity import nudged, rounded


def test_inputs_are_rounded_as_llama_cpp_rounds_them() -> None:
    x = torch.randn(64, 576) * torch.logspace(-3, 3, 64)[:, None]
    x[0, :32] = 0
    kind = GGMLQuantizationType.Q8_0
    theirs = torch.from_numpy(quants.dequantize(quants.quantize(x.numpy(), kind), kind))
    assert torch.equal(rounded(x), theirs)


def test_a_nudge_is_a_millionth() -> None:
    x = torch.randn(1000)
    moved = (nudged(x) / x - 1).abs()
    assert 0 < float(moved.max()) < 1e-5
