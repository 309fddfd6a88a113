"""`ComputeSuite`: what a recipe for low-precision products in training must do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core.config import Config
from ao_core.numerics import sqnr
from ao_core.quantize import quantize_
from ao_core.tensor import ComputeWeight
from ao_core.testing.base import Suite, gaussian, same_bits

__all__ = ["ComputeSuite"]


class ComputeSuite(Suite):
    """Tests of a configuration whose transform gives `ComputeWeight`s.

    Attributes:
        config: an instance of the configuration.
        sqnr_range: what the SQNR of the output and of both gradients may be, in dB.
        loss_gap: how much less, of what it falls in high precision, the loss may fall.
    """

    config: Config
    sqnr_range: tuple[float, float] = (15.0, 75.0)
    loss_gap: float = 0.1

    def arguments(self) -> dict[str, Sequence[Any]]:
        """`batch`: leading dimensions of the input."""
        return {"batch": [(5,), (1,), (2, 3), (17,), ()]}

    def layers(self, seed: int = 0) -> tuple[nn.Linear, nn.Linear]:
        """A dense layer (70 -> 33) and the same with the configuration applied."""
        dense = nn.Linear(70, 33)
        with torch.no_grad():
            dense.weight.copy_(gaussian((33, 70), seed=seed) / 8)
            dense.bias.copy_(gaussian((33,), seed=seed + 1))
        layer = copy.deepcopy(dense)
        report = quantize_(layer, self.config)
        assert [r.fqn for r in report.with_status("quantized")] == ["weight"]
        return dense, layer

    def _near(self, expected: Tensor | None, actual: Tensor | None) -> None:
        assert expected is not None
        assert actual is not None
        assert type(actual) in (Tensor, nn.Parameter)
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        low, _ = self.sqnr_range
        assert low <= float(sqnr(expected, actual))

    def test_memory_is_the_weight(self) -> None:
        """The weight stays in high precision and trainable, bit for bit."""
        dense, layer = self.layers()
        assert isinstance(layer.weight, nn.Parameter)
        assert isinstance(layer.weight, ComputeWeight)
        assert layer.weight.requires_grad
        assert same_bits(layer.weight.hp, dense.weight)

    def test_products(self, batch: tuple[int, ...]) -> None:
        """Output, gradient of the input and of the weight: near the dense ones, the output not equal."""
        results = []
        for layer in self.layers():
            x = gaussian((*batch, 70), seed=5).requires_grad_(True)
            out = layer(x)
            (out * gaussian(out.shape, seed=6)).sum().backward()
            results.append((out.detach(), x.grad, layer.weight.grad, layer.bias.grad))
        (out, *grads), (cast_out, *cast_grads) = results
        self._near(out, cast_out)
        assert float(sqnr(out, cast_out)) <= self.sqnr_range[1]
        for expected, actual in zip(grads, cast_grads, strict=True):
            self._near(expected, actual)

    def test_empty_batch(self) -> None:
        """No rows: an empty output and a zero gradient."""
        _, layer = self.layers()
        out = layer(torch.empty(0, 70))
        assert out.shape == (0, 33)
        out.sum().backward()
        assert layer.weight.grad is not None
        assert not layer.weight.grad.any()

    @pytest.mark.parametrize("foreach", [False, True], ids=["plain", "foreach"])
    def test_trains(self, foreach: bool) -> None:
        """AdamW on a regression: the loss falls as it does in high precision, but for `loss_gap` of it."""
        losses = []
        x, y = gaussian((64, 70), seed=8), gaussian((64, 33), seed=9)
        for layer in self.layers():
            optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-2, foreach=foreach)
            for _ in range(30):
                optimizer.zero_grad()
                loss = F.mse_loss(layer(x), y)
                loss.backward()
                optimizer.step()
            losses.append(float(loss.detach()))
        start = float(F.mse_loss(self.layers()[0](x), y).detach())
        dense, cast = losses
        assert dense < 0.5 * start
        assert abs(cast - dense) <= self.loss_gap * (start - dense)

    def test_no_grad_equals_grad(self) -> None:
        """The same output with and without autograd, and in inference mode."""
        _, layer = self.layers()
        x = gaussian((5, 70), seed=5)
        expected = layer(x).detach()
        with torch.no_grad():
            assert torch.equal(layer(x), expected)
        with torch.inference_mode():
            assert torch.equal(layer(x), expected)

    def test_autocast(self) -> None:
        """Under autocast the layer computes in that dtype; gradients stay in the weight's."""
        _, layer = self.layers()
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(gaussian((5, 70), seed=5))
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32

    def test_copies_and_dtypes(self) -> None:
        """Copies and `.to(dtype)` keep the casts; copies share no memory."""
        _, layer = self.layers()
        again = copy.deepcopy(layer)
        assert isinstance(again.weight, nn.Parameter)
        assert isinstance(again.weight, ComputeWeight)
        assert again.weight.requires_grad
        memory, weight = again.weight.hp, layer.weight
        assert isinstance(weight, ComputeWeight)
        assert memory.data_ptr() != weight.hp.data_ptr()
        x = gaussian((5, 70), seed=5)
        assert torch.equal(again(x), layer(x))
        half = again.to(torch.bfloat16)
        assert isinstance(half.weight, ComputeWeight)
        assert half(x.bfloat16()).dtype == torch.bfloat16

    @pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
    def test_state_dict(self, assign: bool, tmp_path: Path) -> None:
        """torch.save with weights_only, dense weights in, its own weights out to a dense layer."""
        dense, layer = self.layers()
        _, target = self.layers(seed=4)
        x = gaussian((5, 70), seed=5)
        torch.save(layer.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        target.load_state_dict(state, assign=assign)
        assert isinstance(target.weight, ComputeWeight)
        assert torch.equal(target(x), layer(x))
        _, target = self.layers(seed=4)
        target.load_state_dict(dense.state_dict())
        assert torch.equal(target(x), layer(x))
        plain = nn.Linear(70, 33)
        plain.load_state_dict(layer.state_dict())
        assert same_bits(plain.weight, dense.weight)

    def test_save_model(self, tmp_path: Path) -> None:
        """A checkpoint holds the plain weight, which any layer loads."""
        from ao_core.tensor.saving import load_model, save_model

        dense, layer = self.layers()
        save_model(layer, tmp_path / "model")
        plain = nn.Linear(70, 33)
        load_model(plain, tmp_path / "model")
        assert same_bits(plain.weight, dense.weight)

    def test_compiles(self) -> None:
        """One graph forward and backward, with the results of eager, and no second compilation."""
        import torch._dynamo.testing

        _, layer = self.layers()
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled: Any = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=counter)
        for seed in (5, 6):
            results: list[tuple[Any, ...]] = []
            for each in (layer, compiled):
                x = gaussian((5, 70), seed=seed).requires_grad_(True)
                each.zero_grad(set_to_none=True)
                out = each(x)
                out.square().sum().backward()
                results.append((out.detach(), x.grad, each.get_parameter("weight").grad))
            for expected, actual in zip(*results, strict=True):
                assert float(sqnr(expected, actual)) > 100
        assert counter.frame_count == 1
        torch._dynamo.reset()
