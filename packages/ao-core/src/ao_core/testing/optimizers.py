"""`OptimizerSuite`: what an optimizer must do, whatever the precision of its state."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ao_core.registry import registry
from ao_core.testing.base import Suite, gaussian, same_bits

__all__ = ["OptimizerSuite"]


class OptimizerSuite(Suite):
    """Tests of one optimizer: the contract of `torch.optim.Optimizer`, and that it converges.

    Attributes:
        optimizer: its registered name, or the class.
        options: arguments beside the parameters, a learning rate among them.
        rates: learning rates, one of which converges; the first is that of all other tests.
        steps: enough of them to bring the loss of a convex problem below a hundredth.

    An optimizer that is for matrices only says so by its ValueError for other parameters.
    """

    optimizer: str | type[torch.optim.Optimizer]
    options: ClassVar[dict[str, Any]] = {"lr": 0.05}
    rates: ClassVar[tuple[float, ...]] = (0.05, 0.5)
    steps = 200

    def make(self, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        """The optimizer over these parameters."""
        given = self.optimizer
        cls = registry.optimizers.get(given) if isinstance(given, str) else given
        return cls(parameters, **{**self.options, **options})

    @property
    def only_matrices(self) -> bool:
        """Whether the optimizer refuses vectors."""
        try:
            self.make([nn.Parameter(torch.zeros(3))])
        except ValueError:
            return True
        return False

    def problem(self, dtype: torch.dtype = torch.float32) -> _LeastSquares:
        """A convex problem with a known solution."""
        return _LeastSquares(dtype, (97, 71), (24, 1) if self.only_matrices else (24,))

    def run(
        self,
        problem: _LeastSquares,
        optimizer: torch.optim.Optimizer,
        steps: int,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> list[float]:
        """The loss before each step."""
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = problem()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if schedule is not None:
                schedule.step()
        return losses

    def _ended(self, problem: _LeastSquares, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The parameters after five more steps, whose random roundings are the same in each call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.run(problem, optimizer, 5)
        return [p.detach().clone() for p in problem.parameters()]

    # -- optimizing ------------------------------------------------------------------------------

    def test_is_an_optimizer(self) -> None:
        """Registered classes derive from torch's, and keep the options as defaults."""
        optimizer = self.make(self.problem().parameters())
        assert isinstance(optimizer, torch.optim.Optimizer)
        for name, value in self.options.items():
            assert optimizer.defaults[name] == value

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_converges(self, dtype: torch.dtype) -> None:
        """Least squares in both dtypes of parameters, as lr falls: to a hundredth of the first loss."""
        reached = []
        for rate in self.rates:
            problem = self.problem(dtype)
            optimizer = self.make(problem.parameters(), lr=rate)
            self._decay_nothing(optimizer)
            falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, self.steps)
            losses = self.run(problem, optimizer, self.steps, falling)
            assert all(bool(torch.isfinite(p).all()) for p in problem.parameters())
            reached.append(min(losses[-10:]) / losses[0])
            if reached[-1] < 0.01:
                return
        raise AssertionError(f"learning rates {self.rates} end at {reached} of the first loss")

    def test_first_step_goes_downhill(self) -> None:
        """One step changes every parameter that has a gradient and lowers the loss."""
        problem = self.problem()
        before = [p.detach().clone() for p in problem.parameters()]
        optimizer = self.make(problem.parameters(), lr=1e-3)
        (first,) = self.run(problem, optimizer, 1)
        assert float(problem().detach()) < first
        for new, old in zip(problem.parameters(), before, strict=True):
            assert not torch.equal(new, old)

    def test_is_deterministic(self) -> None:
        """Equal runs give equal bits, with the same seed where rounding is random."""
        runs = []
        for _ in range(2):
            problem = self.problem()
            runs.append(self._ended(problem, self.make(problem.parameters())))
        assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))

    def test_shapes(self) -> None:
        """Scalars, empty, odd and transposed parameters; those without a gradient stay."""
        shapes = [(), (1,), (0,), (3, 0), (257,), (5, 7), (2, 3, 4, 5), (65, 64), (4097,)]
        if self.only_matrices:
            shapes = [shape for shape in shapes if len(shape) == 2]
        parameters = [nn.Parameter(gaussian(shape)) for shape in shapes]
        parameters.append(nn.Parameter(gaussian((8, 300)).t()))
        idle = nn.Parameter(gaussian((5, 1)))
        kept = idle.detach().clone()
        optimizer = self.make([*parameters, idle])
        for _ in range(3):
            optimizer.zero_grad()
            torch.stack([p.square().sum() for p in parameters]).sum().backward()
            sizes = [float(p.detach().norm()) for p in parameters]
            optimizer.step()
            for p, size in zip(parameters, sizes, strict=True):
                assert bool(torch.isfinite(p).all())
                assert float(p.detach().norm()) < size or not p.numel()
        assert same_bits(idle, kept)

    # -- the contract of torch -------------------------------------------------------------------

    @pytest.mark.parametrize("through_file", [False, True], ids=["memory", "file"])
    def test_state_dict(self, through_file: bool, tmp_path: Path) -> None:
        """Saved and loaded in the middle, a run ends with the bits of one that was not."""
        problem = self.problem()
        optimizer = self.make(problem.parameters())
        self.run(problem, optimizer, 5)
        resumed = copy.deepcopy(problem)
        other = self.make(resumed.parameters(), lr=123.0)
        state = optimizer.state_dict()
        if through_file:
            torch.save(state, tmp_path / "optimizer.pt")
            state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
        other.load_state_dict(copy.deepcopy(state))
        ends = []
        for each, its in ((problem, optimizer), (resumed, other)):
            ends.append(self._ended(each, its))
        assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))

    def test_param_groups(self) -> None:
        """Options of a group are its own; groups can be added; lr=0 stands still."""
        problem = self.problem()
        weight, bias = problem.parameters()
        optimizer = self.make([{"params": [weight]}])
        optimizer.add_param_group({"params": [bias], "lr": 0.0})
        frozen, moving = bias.detach().clone(), weight.detach().clone()
        self.run(problem, optimizer, 3)
        assert len(optimizer.param_groups) == 2
        assert same_bits(bias, frozen)
        assert not torch.equal(weight, moving)

    def test_schedulers(self) -> None:
        """A learning-rate scheduler steers the steps: at 0 nothing moves."""
        problem = self.problem()
        optimizer = self.make(problem.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 3))
        moved = []
        for _ in range(5):
            before = [p.detach().clone() for p in problem.parameters()]
            self.run(problem, optimizer, 1)
            now = list(problem.parameters())
            moved.append(not all(same_bits(a, b) for a, b in zip(now, before, strict=True)))
            schedule.step()
        assert moved == [True, True, True, False, False]

    def test_tensor_learning_rate(self) -> None:
        """A tensor as learning rate does what the number does, also when it is changed in place."""
        ends = []
        for lr in (0.25, torch.tensor(0.25)):
            problem = self.problem()
            optimizer = self.make(problem.parameters(), lr=lr)
            self.run(problem, optimizer, 2)
            if isinstance(lr, Tensor):
                lr.fill_(0.0)
            else:
                optimizer.param_groups[0]["lr"] = 0.0
            self.run(problem, optimizer, 1)
            ends.append([p.detach().clone() for p in problem.parameters()])
        assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))

    def test_gradient_scaler_and_clipping(self) -> None:
        """An infinite gradient skips the step; a clipped one is taken as it is after clipping."""
        problem = self.problem()
        optimizer = self.make(problem.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
        before = [p.detach().clone() for p in problem.parameters()]
        scaler.scale(problem() * 2.0**10).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(map(same_bits, (p.detach() for p in problem.parameters()), before))
        optimizer.zero_grad()
        problem().backward()
        torch.nn.utils.clip_grad_value_(problem.parameters(), 0.0)
        self._decay_nothing(optimizer)
        optimizer.step()
        assert all(map(same_bits, (p.detach() for p in problem.parameters()), before))

    def _decay_nothing(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0

    def test_maximize(self) -> None:
        """`maximize`, where it is an option, goes the other way."""
        problem = self.problem()
        optimizer = self.make(problem.parameters(), lr=1e-3)
        if "maximize" not in optimizer.defaults:
            return
        optimizer = self.make(problem.parameters(), lr=1e-3, maximize=True)
        self._decay_nothing(optimizer)
        (first,) = self.run(problem, optimizer, 1)
        assert float(problem().detach()) > first

    def test_closure(self) -> None:
        """`step(closure)` evaluates it with gradients enabled and returns its loss."""
        problem = self.problem()
        optimizer = self.make(problem.parameters())
        calls = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = problem()
            loss.backward()
            calls.append(float(loss.detach()))
            return loss

        with torch.no_grad():
            returned: Any = optimizer.step(closure)  # type: ignore[arg-type]
        assert float(returned.detach()) == calls[0]
        assert float(problem().detach()) < calls[0]

    def test_hooks(self) -> None:
        """Hooks before and after a step are called, once each."""
        problem = self.problem()
        optimizer = self.make(problem.parameters())
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
        optimizer.register_step_post_hook(lambda *_: seen.append("post"))
        self.run(problem, optimizer, 1)
        assert seen == ["pre", "post"]

    def test_bad_arguments(self) -> None:
        """What cannot be is refused in torch's words, and sparse gradients in any."""
        problem = self.problem()
        with pytest.raises(ValueError, match="-1"):
            self.make(problem.parameters(), lr=-1.0)
        with pytest.raises(ValueError, match="empty"):
            self.make([])
        if "betas" in self.make(problem.parameters()).defaults:
            with pytest.raises(ValueError, match=r"Invalid beta.*1\.5"):
                self.make(problem.parameters(), betas=(1.5, 0.9))
        sparse = nn.Parameter(gaussian((5, 3)))
        indices = torch.tensor([[1], [2]])
        sparse.grad = torch.sparse_coo_tensor(indices, torch.ones(1), (5, 3), check_invariants=True)
        with pytest.raises(RuntimeError, match="sparse"):
            self.make([sparse]).step()

    def test_bad_state_dicts(self) -> None:
        """The state of other parameters is refused, and nothing has changed then."""
        problem = self.problem()
        optimizer = self.make(problem.parameters())
        self.run(problem, optimizer, 2)
        before = copy.deepcopy(optimizer.state_dict())
        other = self.make(list(problem.parameters())[:1]).state_dict()
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict(other)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert after["state"].keys() == before["state"].keys()

    def test_global_generator_is_left_alone(self) -> None:
        """Making an optimizer seeds nothing."""
        before = torch.get_rng_state()
        self.make(self.problem().parameters())
        assert torch.equal(torch.get_rng_state(), before)


class _LeastSquares(nn.Module):
    """Half the squares of weight - solution and of the bias: convex, and 0 at the solution."""

    def __init__(self, dtype: torch.dtype, weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(gaussian(weight, seed=1).to(dtype))
        self.bias = nn.Parameter(gaussian(bias, seed=2).to(dtype))
        self.register_buffer("solution", gaussian(weight, seed=3))

    def forward(self) -> Tensor:
        """The loss in float32."""
        error = self.weight.float() - self.get_buffer("solution")
        return (error.square().sum() + self.bias.float().square().sum()) / 2
