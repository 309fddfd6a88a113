"""Which modules of a decoder block do what, as a run shows: no name of a class or module is asked for."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import QTensor
from ao_core.ext.kernels import GAINS, GATES, NormBefore, normed
from ao_hf.fusing.observe import AttentionSeen, Observed

__all__ = [
    "AttentionParts",
    "MlpParts",
    "NotFused",
    "attention_parts",
    "is_own",
    "mlp_parts",
    "norm_before",
    "plain",
]

#: names under which norms keep what is added to the mean of squares
_EPS = ("variance_epsilon", "eps")


class NotFused(Exception):
    """Why something is not fused: a sentence without its end."""


@dataclass(frozen=True)
class AttentionParts:
    """The linear layers of an attention module."""

    module: Any
    #: of queries, keys and values, in this order
    inputs: tuple[nn.Linear, ...]
    output: nn.Linear
    heads: tuple[int, int, int]
    #: what the attention function is told besides what the block is
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class MlpParts:
    """The linear layers of an MLP module."""

    module: nn.Module
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    #: one of `GATES`
    activation: str


def is_own(module: nn.Module, name: str) -> bool:
    """Whether an attribute is the method of the module's class, as it is in copies of fused modules."""
    found = vars(module).get(name)
    own = getattr(type(module), name, None)
    return isinstance(found, MethodType) and found.__self__ is module and found.__func__ is own


def plain(module: nn.Module, name: str = "") -> None:
    """Raise `NotFused` unless a module does nothing but what its class says."""
    what = name or type(module).__name__
    if "forward" in vars(module) or hasattr(module, "_hf_hook"):
        raise NotFused(f"{what} has a forward of its own, such as a hook of accelerate")
    if module._forward_hooks or module._forward_pre_hooks:
        raise NotFused(f"{what} has hooks")


def _linears(module: nn.Module) -> list[nn.Linear]:
    """Linear layers in a module, all of which it must multiply by itself."""
    plain(module)
    found = []
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            plain(child, name)
            if type(child.weight) is not QTensor:
                raise NotFused(f"the weight of {name} is not quantized")
            if hasattr(child, "_hf_tp_plan"):
                raise NotFused(f"{name} is sharded over devices")
            found.append(child)
        elif any(True for _ in child.parameters()):
            raise NotFused(f"{name} is a {type(child).__name__}, no plain nn.Linear")
    return found


def _by_input(linears: list[nn.Linear], observed: Observed) -> list[list[nn.Linear]]:
    """Those that read the same tensor, in the order in which they were called."""
    groups: dict[int, list[nn.Linear]] = {}
    for linear in linears:
        calls = observed.calls.get(linear)
        if not calls or len(calls) != 2:
            raise NotFused("a linear layer is not called once for each run")
        groups.setdefault(id(calls[0].x), []).append(linear)
    return list(groups.values())


def attention_parts(seen: AttentionSeen, observed: Observed) -> AttentionParts:
    """The parts of the module that called an attention function.

    Raises:
        NotFused: it is not made of four linear layers, three of which read the same.
    """
    module = seen.module
    groups = sorted(_by_input(_linears(module), observed), key=len)
    if [len(group) for group in groups] != [1, 3]:
        raise NotFused("attention has not four linear layers, three of which read the same")
    (output,), inputs = groups
    if not hasattr(module, "layer_idx"):
        raise NotFused("attention does not know the number of its layer")
    (_, query, _, dim), key = seen.query.shape, seen.key.shape[1]
    if [linear.out_features for linear in inputs] != [query * dim, key * dim, key * dim]:
        raise NotFused("queries, keys and values are not heads of one size")
    return AttentionParts(module, tuple(inputs), output, (query, key, dim), seen.kwargs)


def mlp_parts(module: nn.Module, observed: Observed) -> MlpParts:
    """The parts of a gated MLP.

    Raises:
        NotFused: it is none, or with an activation function that no kernel knows.
    """
    groups = sorted(_by_input(_linears(module), observed), key=len)
    if [len(group) for group in groups] != [1, 2]:
        raise NotFused("the MLP has not three linear layers, two of which read the same")
    (down,), (first, second) = groups
    x = _strong_input(first, second, observed.calls[module][0].x)
    with torch.no_grad():
        made = module(x)
        for gate, up in ((first, second), (second, first)):
            for name in GATES:
                active = F.silu(gate(x)) if name == "silu" else F.gelu(gate(x), approximate="tanh")
                if _near(down(active * up(x)), made, x.dtype):
                    return MlpParts(module, gate, up, down, name)
    raise NotFused(f"the MLP is not down(f(gate(x)) * up(x)), f being {' or '.join(GATES)}")


def _strong_input(first: nn.Linear, second: nn.Linear, like: Tensor) -> Tensor:
    """An input at which activation functions differ: with numbers around 2 behind both layers."""
    generator = torch.Generator(like.device).manual_seed(0)
    x = torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)
    with torch.no_grad():
        sizes = [linear(x).float().square().mean().sqrt() for linear in (first, second)]
    return x * (2 / torch.stack(sizes).amin().clamp(min=1e-6)).to(x.dtype)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm())


def _near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    return _error(found, expected) <= 4 * torch.finfo(dtype).eps * float(expected.double().norm())


def norm_before(module: nn.Module) -> NormBefore:
    """An RMS norm as the ops are told of it.

    A copy of it is tried with random weights, on rows down to where epsilon matters.

    Raises:
        NotFused: it is no RMS norm.
    """
    plain(module)
    weight: Any = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in _EPS if hasattr(module, name)), None)
    others = [name for name, _ in module.named_parameters() if name != "weight"]
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float) or others:
        raise NotFused(f"{type(module).__name__} is no RMS norm with a weight and an epsilon")
    tried: Any = copy.deepcopy(module)
    generator = torch.Generator(weight.device).manual_seed(0)
    with torch.no_grad():
        tried.weight.normal_(generator=generator)
        x = torch.randn(4, len(weight), generator=generator, device=weight.device)
        scales = torch.tensor([[1.0], [30.0], [eps**0.5], [0.1 * eps**0.5]], device=x.device)
        x = (x * scales).to(weight.dtype)
        found = tried(x)
        formulas = {gain: normed(x, NormBefore(tried.weight, eps, gain)) for gain in GAINS}
    gain = min(formulas, key=lambda name: _error(formulas[name], found))
    if not all(_near(a, b, x.dtype) for a, b in zip(formulas[gain], found, strict=True)):
        raise NotFused(f"{type(module).__name__} is not x / rms(x) times its weight")
    return NormBefore(weight, eps, gain)
