"""PARQ: weights that an optimizer draws to the values of a format, gradually."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import Config, QTensor, Skip, Target, resolve_config
from ao_core.ext import AoError, ConfigError, registry
from ao_core.ext.numerics import expand, scale_to_float, zero_to_float
from ao_core.ext.quantizing import FilterFn, decide

__all__ = ["MAPS", "ProximalOptimizer", "inverse_slope"]

#: the values of `ProximalOptimizer.mapping`
MAPS = ("parq", "relax")
#: how steep the sigmoid of `inverse_slope` is
_STEEPNESS = 10.0


def inverse_slope(share: float) -> float:
    """ρ after this share of the annealing: a mirrored sigmoid that goes from 1 at 0 to 0 at 1."""
    if share <= 0 or share >= 1:
        return float(share <= 0)

    def sigmoid(at: float) -> float:
        return 1 / (1 + math.exp(_STEEPNESS * (at - 0.5)))

    return (sigmoid(share) - sigmoid(1)) / (sigmoid(0) - sigmoid(1))


class ProximalOptimizer:
    """An optimizer around another that draws weights to the values of a format, without changing the model.

    The inner optimizer steps a latent copy u of each weight, with the gradient at the weight p = prox(u):

    - "parq" (Jin et al. 2025, arXiv:2503.15748): between two neighbouring values of the format with centre c,
      p = clamp(c + (u - c) / ρ) to the two; of a u beyond the outermost value, the part beyond it times ρ. ρ
      goes from 1, where p = u, to 0, where p is the nearer value: the straight-through estimator. For
      integers and ternary weights of linear layers.
    - "relax" (BinaryRelax, Yin et al. 2018, arXiv:1801.06313): p = ρ u + (1 - ρ) q, with the nearest value q.
      For any format.

    Scales follow u in each step, as the configuration chooses them. At the end `store_latent_` puts u into
    the model, and ``quantize_(model, base)`` stores exactly the values that p had.

    Args:
        optimizer: any optimizer of torch, or with its interface, over parameters of `model`.
        model: dense; not prepared by `QATConfig`, whose forward pass rounds already.
        base: the configuration, or the name of a recipe, or a `FqnToConfig`, by which weights will be
            quantized.
        end: the number of steps after which ρ is 0.
        start: the number of steps before ρ falls.
        mapping: one of `MAPS`.
        filter_fn: as of `quantize_`.

    Raises:
        ConfigError: `optimizer` has none of the weights, or an argument is out of range, or a weight's format
            has no even steps while the mapping is "parq".
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        base: Config | str,
        *,
        end: int,
        start: int = 0,
        mapping: str = "parq",
        filter_fn: FilterFn | None = None,
    ) -> None:
        if mapping not in MAPS:
            raise ConfigError(f"mapping={mapping!r}: use one of {', '.join(map(repr, MAPS))}")
        if not 0 <= start < end:
            raise ConfigError(f"start={start!r}, end={end!r}: use 0 or more, and a greater end")
        self.optimizer = optimizer
        self.mapping, self.start, self.end, self.done = mapping, start, end, 0
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._weights: list[tuple[str, Tensor, Callable[[Tensor], Tensor]]] = []
        for entry in decide(model, resolve_config(base), filter_fn):
            if entry.config is None or id(entry.tensor) not in held:
                continue
            transform, target = registry.transform_for(type(entry.config)), entry.owners[0]

            nearest = partial(_applied, transform.apply, entry.config, target)
            found = nearest(entry.tensor.detach())
            if isinstance(found, Skip):
                continue
            if mapping == "parq" and (reason := _uneven(found)):
                raise ConfigError(f"{entry.fqn}: {reason}; use mapping='relax'")
            self._weights.append((entry.fqn, entry.tensor, nearest))
        if not self._weights:
            raise ConfigError(
                "optimizer: it has no weight that the base quantizes; make it from parameters of the model"
            )
        #: by name, what the inner optimizer steps
        self.latent = {fqn: weight.detach().clone() for fqn, weight, _ in self._weights}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizer, for schedules of the learning rate."""
        return self.optimizer.param_groups

    @property
    def slope(self) -> float:
        """ρ of the last step."""
        return inverse_slope((self.done - self.start) / (self.end - self.start))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of torch."""
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the latent weights, and map them; the closure is evaluated at the mapped weights."""
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        self.store_latent_()
        self.optimizer.step()
        self.done += 1
        rho = self.slope
        for fqn, weight, nearest in self._weights:
            u = self.latent[fqn]
            u.copy_(weight)
            weight.copy_(_mapped(u, nearest(u), rho, self.mapping))
        return found

    @torch.no_grad()
    def store_latent_(self) -> None:
        """Put the latent weights into the model, as before it is quantized."""
        for fqn, weight, _ in self._weights:
            weight.copy_(self.latent[fqn])

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from: plain tensors and numbers."""
        return {"optimizer": self.optimizer.state_dict(), "latent": self.latent, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another left off; the model is loaded by itself.

        Raises:
            AoError: `state` is not of the same weights.
        """
        if set(state) != {"optimizer", "latent", "done"} or set(state["latent"]) != set(
            self.latent
        ):
            raise AoError("state: it is not that of a ProximalOptimizer of these weights")
        self.optimizer.load_state_dict(state["optimizer"])
        for fqn, value in state["latent"].items():
            self.latent[fqn].copy_(value)
        self.done = state["done"]


def _applied(apply: Callable[..., Any], config: Config, target: Target, u: Tensor) -> Any:
    return apply(u, config, target)


def _uneven(q: Tensor) -> str | None:
    """Why there are no two neighbours in even steps, by the scale of each block."""
    if not isinstance(q, QTensor) or q.dim() != 2 or q.is_permuted:
        return "it is not the matrix of a linear layer"
    kind = registry.dtypes.get(q.spec.dtype).kind
    plain = isinstance(q.spec.scale_dtype, str) and q.spec.zero_point != "offset"
    even = kind == "int" or q.spec.dtype == "ternary"
    return None if plain and even and not q.spec.input else f"{q.spec} has no even steps"


def _mapped(u: Tensor, q: Any, rho: float, mapping: str) -> Tensor:
    """Prox(u), where `q` is what u is rounded to."""
    if rho <= 0:
        return q.dequantize()  # type: ignore[no-any-return]
    if mapping == "relax":
        return u.lerp(q.dequantize(), 1 - rho)
    base, numbers = q.canonical(), registry.dtypes.get(q.spec.dtype)
    scale = expand(scale_to_float(base.parts["scale"]), u.shape, base.spec.block)
    zero: Any = 0.0
    if "zero_point" in base.parts:
        zero = expand(zero_to_float(base.parts["zero_point"], numbers), u.shape, base.spec.block)
    wide = torch.promote_types(u.dtype, torch.float32)
    ratio = (u.to(wide) / scale + zero).clamp(numbers.min, numbers.max)
    low = ratio.floor().clamp(max=numbers.max - 1)
    part = (0.5 + (ratio - low - 0.5) / rho).clamp(0, 1)
    # beyond the ends p is u while it is free, and the end when it is not
    beyond = u.to(wide) - (ratio - zero) * scale
    mapped: Tensor = (low + part - zero) * scale + rho * beyond
    return mapped.to(u.dtype)
