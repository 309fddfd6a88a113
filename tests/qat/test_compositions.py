"""Quantization-aware training with optimizers in 8 bits, masks of zeros, 2:4 formats, and float8 "
"gradients."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ao_core import QTensor, quantize_
from ao_core.ext.compute import TrainingWarning
from ao_core.ext.quantizing import EmulationWarning
from ao_core.testing.base import gaussian
from ao_optim import AdamW8bit
from ao_quant import Int4WeightOnlyConfig, LoRAQATConfig, QATConfig, UIntxWeightOnlyConfig
from ao_sparsity import Unstructured, apply_masks, keep_masks, prune_magnitude

INT4 = Int4WeightOnlyConfig(32)
X, TARGET = gaussian((32, 64), seed=1), gaussian((32, 20), seed=2)


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 20))


def step(made: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X) -> float:
    optimizer.zero_grad()
    loss = (made(x).float() - TARGET).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("scales", ["chosen", "learned"])
def test_state_in_8_bits(scales: str) -> None:
    made = model()
    quantize_(made, QATConfig(INT4, scales=scales))
    beside = [p for name, p in made.named_parameters() if "weight_" in name]
    others = [p for name, p in made.named_parameters() if "weight_" not in name]
    groups = [{"params": others, "lr": 3e-3}, {"params": beside, "lr": 3e-5}]
    optimizer = AdamW8bit([group for group in groups if group["params"]])
    losses = [step(made, optimizer) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    trained = made(X)
    quantize_(made, QATConfig(INT4, "convert", scales))
    assert torch.equal(made(X), trained)


def test_stochastic_rounding_moves_weights_in_bfloat16() -> None:
    """The cure that the warning names: nothing is said, and the loss falls where it does not otherwise."""
    ends = {}
    for rounding in ("stochastic", "nearest"):
        made = model().bfloat16()
        start = made[0].weight.detach().clone()
        quantize_(made, QATConfig(INT4))
        optimizer = AdamW8bit(made.parameters(), lr=2e-5, weight_decay=0.0, rounding=rounding)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(12):
                step(made, optimizer, X.bfloat16())
        assert any(issubclass(w.category, TrainingWarning) for w in said) == (rounding == "nearest")
        ends[rounding] = float((made[0].weight.memory != start).float().mean())
    assert ends["stochastic"] > 2 * ends["nearest"]


def test_masks_of_zeros() -> None:
    """Pruned weights that are held at 0 while they are rounded stay 0 in what is stored."""
    made = model()
    found = prune_magnitude(made, Unstructured(0.5))
    apply_masks(made, found)
    quantize_(made, QATConfig(INT4))
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    with keep_masks(made, optimizer):
        losses = [step(made, optimizer) for _ in range(20)]
    assert losses[-1] < losses[0]
    trained = made(X)
    quantize_(made, QATConfig(INT4, "convert"))
    assert torch.equal(made(X), trained)
    for name, mask in found.masks.items():
        assert float(made.get_parameter(name).dequantize()[~mask].abs().max()) == 0


@pytest.mark.parametrize(
    "base", ["int4_weight_only_semi_sparse", "int8_dynamic_activation_int8_semi_sparse_weight"]
)
def test_weights_that_are_stored_2_of_4(base: str) -> None:
    made = model()
    quantize_(made, QATConfig(base))
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    losses = [step(made, optimizer) for _ in range(12)]
    assert losses[-1] < losses[0]
    trained = made(X)
    quantize_(made, QATConfig(base, "convert"))
    assert isinstance(made[0].weight, QTensor)
    assert torch.equal(made(X), trained)
    zeros = (made[0].weight.dequantize() == 0).reshape(96, -1, 4).sum(-1)
    assert bool((zeros >= 2).all())


def test_gradients_in_float8() -> None:
    """The forward pass has the same bits; both gradients are near those in high precision."""
    found, outputs = {}, {}
    for backward in ("high_precision", "float8"):
        made = model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmulationWarning)
            quantize_(made, QATConfig(INT4, backward=backward))
        outputs[backward] = made(X)
        (outputs[backward] - TARGET).square().mean().backward()
        found[backward] = [p.grad for p in made.parameters()]
        quantize_(made, QATConfig(INT4, "convert"))
        assert torch.equal(made(X), outputs[backward])
    assert torch.equal(*outputs.values())
    for exact, low in zip(*found.values(), strict=True):
        assert float((low - exact).norm()) < 0.1 * float(exact.norm())
    assert not torch.equal(found["float8"][0], found["high_precision"][0])


CONFIGS = {
    "learned": QATConfig(INT4, scales="learned"),
    "stretched": QATConfig(UIntxWeightOnlyConfig(2, 32, zero_point="float"), scales="stretched"),
    "clipped": QATConfig(INT4, scales="clipped"),
    "adapters beside": LoRAQATConfig(INT4, rank=4),
    "adapters merged": LoRAQATConfig(INT4, mode="merged", rank=4),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "adapters merged" else pytest.param(name, marks=pytest.mark.slow)
        for name in CONFIGS
    ],
)
def test_ways_to_a_gradient(name: str) -> None:
    """Compiled once for all steps, under activation checkpointing, accumulated: as one pass in eager."""
    made = model()
    quantize_(made, CONFIGS[name])
    twins = [copy.deepcopy(made) for _ in range(3)]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(twins[0], fullgraph=True, backend=counter)

    def in_parts(x: Tensor) -> None:
        for rows, by in zip(x.split(16), TARGET.split(16), strict=True):
            ((twins[2](rows) - by).square().sum() / TARGET.numel()).backward()

    for seed in range(3):
        x = gaussian((32, 64), seed=seed)
        (made(x) - TARGET).square().mean().backward()
        (compiled(x) - TARGET).square().mean().backward()
        (checkpoint(twins[1], x, use_reentrant=False) - TARGET).square().mean().backward()
        in_parts(x)
        for twin in twins:
            pairs = zip(made.named_parameters(), twin.parameters(), strict=True)
            for (parameter_name, expected), found in pairs:
                if expected.grad is not None:
                    torch.testing.assert_close(
                        found.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=parameter_name
                    )
        with torch.no_grad():
            for net in (made, *twins):
                for parameter, source in zip(net.parameters(), made.parameters(), strict=True):
                    if source.grad is not None and net is not made:
                        parameter -= 1e-3 * source.grad
                    parameter.grad = parameter.grad if net is made else None
            for parameter in made.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad
                    parameter.grad = None
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CONFIGS)
def test_autocast(name: str) -> None:
    made = model()
    quantize_(made, CONFIGS[name])
    with torch.autocast("cpu", torch.bfloat16):
        trained = made(X)
    trained.float().square().mean().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in made.parameters())
    config = CONFIGS[name]
    fields = {
        n: getattr(config, n) for n in ("scales", "mode", "rank", "alpha") if hasattr(config, n)
    }
    quantize_(made, type(config)(config.base, "convert", **fields))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made(X), trained)
