"""`ComputeSuite`: what a recipe for low-precision matmuls in training must do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ao_core.compute import ComputeWeight
from ao_core.config import Config
from ao_core.numerics import sqnr
from ao_core.quantize import quantize_
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
        assert [r.fqn for r in report.with_status("changed")] == ["weight"]
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
        assert same_bits(layer.weight.memory, dense.weight)

    def test_matmuls(self, batch: tuple[int, ...]) -> None:
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
        memory, weight = again.weight.memory, layer.weight
        assert isinstance(weight, ComputeWeight)
        assert memory.data_ptr() != weight.memory.data_ptr()
        x = gaussian((5, 70), seed=5)
        assert torch.equal(again(x), layer(x))
        half = again.to(torch.bfloat16)
        assert isinstance(half.weight, ComputeWeight)
        assert half(x.bfloat16()).dtype == torch.bfloat16

    @pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
    def test_state_dict(self, assign: bool, tmp_path: Path) -> None:
        """What torch.save keeps is plain; copied into a layer or assigned, its matmuls stay."""
        dense, layer = self.layers()
        _, target = self.layers(seed=4)
        x = gaussian((5, 70), seed=5)
        torch.save(layer.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert type(state["weight"]) is Tensor
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

    def _gradients(self, layer: nn.Module, x: Tensor, call: Any = None) -> list[Tensor | None]:
        x = x.clone().requires_grad_(True)
        layer.zero_grad()
        (layer(x) if call is None else call(layer, x)).square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in layer.parameters())]

    @pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["", "autocast"])
    def test_activation_checkpointing(self, reentrant: bool, dtype: torch.dtype | None) -> None:
        """A forward pass that is computed again in the backward one gives the same gradients."""
        _, layer = self.layers()

        def again(module: nn.Module, x: Tensor) -> Any:
            return checkpoint(module, x, use_reentrant=reentrant)

        def once(module: nn.Module, x: Tensor) -> Any:
            return module(x)

        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            both = [self._gradients(layer, gaussian((5, 70), seed=5), fn) for fn in (once, again)]
        for expected, actual in zip(*both, strict=True):
            assert expected is not None
            assert actual is not None
            assert same_bits(expected, actual)

    def test_gradient_accumulation(self) -> None:
        """Two backward passes add up, in a plain gradient."""
        _, layer = self.layers()
        halves = gaussian((10, 70), seed=5).split(5)
        alone = []
        for half in halves:
            layer.zero_grad()
            layer(half).square().sum().backward()
            alone.append([p.grad for p in layer.parameters() if p.grad is not None])
        layer.zero_grad()
        for half in halves:
            layer(half).square().sum().backward()
        for parameter, *parts in zip(layer.parameters(), *alone, strict=True):
            assert parameter.grad is not None
            assert type(parameter.grad) is Tensor
            torch.testing.assert_close(parameter.grad, parts[0] + parts[1])

    @pytest.mark.parametrize("foreach", [False, True], ids=["plain", "foreach"])
    def test_gradient_clipping(self, foreach: bool) -> None:
        """`clip_grad_norm_` sees the norm of all gradients and scales them."""
        _, layer = self.layers()
        before = [g for g in self._gradients(layer, gaussian((5, 70), seed=5))[1:] if g is not None]
        expected = torch.cat([g.flatten() for g in before]).norm()
        before = [g.clone() for g in before]
        norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.5, foreach=foreach)
        torch.testing.assert_close(norm, expected)
        for parameter, old in zip(layer.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad, old * (0.5 / expected))

    def test_tied_to_an_embedding(self) -> None:
        """Lookups of a weight that a layer shares stay exact; both gradients add up, in one parameter."""
        models = []
        for config in (None, self.config):
            lookup, layer = nn.Embedding(33, 70), nn.Linear(70, 33, bias=False)
            with torch.no_grad():
                lookup.weight.copy_(gaussian((33, 70), seed=0) / 8)
            layer.weight = lookup.weight
            if config is not None:
                (record,) = quantize_(nn.Sequential(lookup, layer), config).records
                assert (record.status, record.tied) == ("changed", ("1.weight",))
            models.append((lookup, layer))
        ids = torch.arange(12).reshape(3, 4)
        (dense, _), (tied, tied_layer) = models
        assert tied.weight is tied_layer.weight
        assert isinstance(tied.weight, ComputeWeight)
        assert same_bits(tied(ids).detach(), dense(ids).detach())
        for lookup, layer in models:
            layer(lookup(ids)).square().sum().backward()
        self._near(dense.weight.grad, tied.weight.grad)
