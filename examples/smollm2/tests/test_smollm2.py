"""The rewritten weights compute the same function, and are on no grid; the figures are of the variant."""

from __future__ import annotations

import copy

import pytest
import torch
from smollm2 import evaluate, model
from torch import nn

from ao_core import quantize_

METADATA = {
    "llama.vocab_size": 97,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
}


@pytest.fixture
def small() -> nn.Module:
    torch.manual_seed(0)
    made = model.from_metadata(METADATA).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.data = (
            torch.randn_like(parameter)
            .mul_(0.2 if parameter.dim() == 2 else 0.1)
            .add_(parameter.dim() == 1)
        )
    return made


def test_another_grid_and_the_same_function(small: nn.Module) -> None:
    ids = torch.randint(97, (2, 20))
    other = model.off_grid(copy.deepcopy(small))
    torch.testing.assert_close(other(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)
    for name, weight in other.named_parameters():
        if name.endswith("_proj.weight"):
            ratio = weight / small.get_parameter(name)
            assert ratio.std(dim=1).min() > 0.02, (
                name
            )  # within each row, columns have their own factors


def test_quality_of_a_variant(small: nn.Module) -> None:
    windows = evaluate.spread(torch.randint(97, (600,)), 2)
    assert windows.shape == (2, evaluate.CONTEXT)
    logs = evaluate.predict(small, windows)
    same = evaluate.quality(logs, windows, lambda window: evaluate.predict(small, window))
    assert same.kl_nats == 0.0
    assert same.agreement == 1.0
    found = []
    for recipe in ("int8_weight_only", "int4_weight_only", "intx_weight_only/2bit"):
        made = model.share(small)
        quantize_(made, recipe)
        found.append(
            evaluate.quality(
                logs, windows, lambda window, made=made: evaluate.predict(made, window)
            ).kl_nats
        )
    assert 0 < found[0] < found[1] < found[2]
