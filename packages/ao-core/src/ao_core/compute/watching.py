"""What goes wrong silently in training weights that are rounded, seen from their gradients: said once."""

from __future__ import annotations

import warnings
import weakref

import torch
from torch import Tensor, nn

from ao_core.compute.extras import extra_tensors
from ao_core.compute.matmuls import rule_name
from ao_core.compute.weight import ComputeWeight

__all__ = ["TrainingWarning", "watch_training"]

#: steps of the optimizer after which weights should have moved, and a share of them that is as good as none
_STEPS, _FEW = 8, 0.01
#: elements of a weight that are looked at
_ELEMENTS = 4096


class TrainingWarning(UserWarning):
    """A weight in training does not learn, or its scale does not."""


#: what was said already, by model
_said: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def watch_training(model: nn.Module, module: nn.Module, name: str, fqn: str) -> None:
    """Let gradients of a weight that a fake-quantize rule rounds tell whether an optimizer moves it.

    A hook is called after each backward pass. It warns, once for a model, if an optimizer steps the weight
    but not its extra tensors; and if the dtype of the weight is too coarse for the steps.
    """
    weight = getattr(module, name)
    if isinstance(weight, ComputeWeight) and rule_name(weight.matmuls.output) and weight.is_leaf:
        watch = _Watch(_said.setdefault(model, set()), module, fqn)
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(watch)  # type: ignore[no-untyped-call]


class _Watch:
    """Compares a weight after one backward pass with what it was after those before."""

    def __init__(self, said: set[str], module: nn.Module, fqn: str) -> None:
        self.said, self.fqn = said, fqn
        self.module = weakref.ref(module)
        self.version, self.steps = -1, 0
        self.first: Tensor | None = None
        self.extras: dict[str, tuple[int, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> None:
        module = self.module()
        if self.steps > _STEPS or module is None or not isinstance(weight, ComputeWeight):
            return
        if self.first is None:
            self.first = _sample(weight.memory).clone()
        elif weight._version != self.version:
            self.steps += 1
            if self.steps == 1:
                self._check_extras(module)
            if self.steps == _STEPS:
                self._check_moves(weight)
                self.steps += 1
        self.version = weight._version
        if self.steps == 0:
            extras = extra_tensors(module).items()
            self.extras = {
                n: (e._version, _sample(e).clone()) for n, e in extras if e.requires_grad
            }

    def _say(self, what: str, text: str) -> None:
        if what not in self.said:
            self.said.add(what)
            warnings.warn(f"{self.fqn}: {text}", TrainingWarning, stacklevel=2)

    def _check_extras(self, module: nn.Module) -> None:
        extras = extra_tensors(module)
        left = [
            f"weight_{name}"
            for name, (version, values) in self.extras.items()
            # some optimizers write without a version, and some steps are too small for a dtype
            if name in extras
            and extras[name]._version == version
            and torch.equal(_sample(extras[name]), values)
        ]
        if left:
            self._say(
                "extras",
                f"an optimizer steps it, and not {', '.join(left)} beside it: it was made before "
                "quantize_, or without them; make it after preparing, from model.parameters()",
            )

    def _check_moves(self, weight: ComputeWeight) -> None:
        if weight.dtype.itemsize > 2 or self.first is None or weight.grad is None:
            return
        now, learns = _sample(weight.memory), _sample(weight.grad) != 0
        if not learns.any():
            return
        # rounding to nearest moves none of the larger ones, and rounding stochastically some
        size = float(now[learns].float().abs().median())
        large = learns & (now.abs() >= size)
        if int((now != self.first)[large].sum()) > _FEW * int(large.sum()):
            return
        stays = (now == self.first) & learns
        moved = (now.float() - self.first.float()).abs()[(now != self.first) & learns]
        step = f"of about {float(moved.median()) / _STEPS:.1g} " if moved.numel() else ""
        share = int(stays.sum()) / int(learns.sum())
        half = size * torch.finfo(weight.dtype).eps / 2
        self._say(
            "moves",
            f"{share:.0%} of its weights in {str(weight.dtype).removeprefix('torch.')} did not move in "
            f"{_STEPS} steps {step}of the optimizer: at their size, {size:.1g}, less than {half:.1g} rounds "
            "to nothing. Keep weights in float32, or use an optimizer that rounds stochastically, such as "
            "ao_optim.AdamW8bit(..., rounding='stochastic')",
        )


def _sample(x: Tensor) -> Tensor:
    """Elements evenly spread over a tensor."""
    return x.detach().reshape(-1)[:: max(x.numel() // _ELEMENTS, 1)]
