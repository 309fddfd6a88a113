"""Further tensors of a `ComputeWeight`, which its module has as parameters, and the layer that reads them.

They are parameters of the *module*, called after the weight: "weight_scale" beside "weight". So everything
that knows parameters knows them: optimizers, `state_dict`, `.to`, deepcopy, FSDP2, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core.compute.emulated import cast_values
from ao_core.compute.fake_quantize import rule_of, without_rule
from ao_core.compute.matmuls import rule_name
from ao_core.compute.weight import ComputeWeight
from ao_core.errors import QuantizationError, UnsupportedOp
from ao_core.spec import Spec
from ao_core.tensor.autocast import autocasted
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.sharding import local_shard

__all__ = ["FakeQuantizedLinear", "extra_tensors", "extras_unsupported_reason", "fit_extras"]


class FakeQuantizedLinear(nn.Linear):
    """An `nn.Linear` whose class was changed in place: it hands its extra tensors to the rule of its weight.

    Where the weight names no rule, e.g. after it was put back to high precision, it is an `nn.Linear`.
    """

    #: names of the extra tensors; the parameters are called "weight_" and the name
    extra_names: tuple[str, ...]

    def forward(self, input: Tensor) -> Tensor:
        """Shape (…, in_features) to (…, out_features)."""
        extras = [getattr(self, f"weight_{name}") for name in self.extra_names]
        out: Tensor = _linear(input, self.weight, self.bias, self.extra_names, *extras)
        return out


# this is run while tracing, not traced: rules choose kernels
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, names: tuple[str, ...], *extras: Tensor
) -> Any:
    inner = _without_transforms(weight)
    spec = inner.matmuls.output if isinstance(inner, ComputeWeight) else None
    rule = rule_of(spec)
    if rule is None or spec is None:
        return F.linear(input, weight, bias)
    if isinstance(inner, ComputeWeight) and isinstance(inner.memory, QTensor):
        raise UnsupportedOp(
            f"the fake-quantize rule {rule.name!r} of a weight that FSDP2 gathered as codes: its values are "
            "rounded already; leave enable_fsdp_float8_all_gather out"
        )
    # a product with 1 is an ordinary tensor that autograd knows to come from the weight
    values = rule.apply(weight * 1, without_rule(spec), dict(zip(names, extras, strict=True)))
    input, values, bias = autocasted(input, values, bias)
    if spec.act is not None:
        input = _CastActivations.apply(input, spec.act)  # type: ignore[no-untyped-call]
    return F.linear(input, values, bias)


def _without_transforms(weight: Tensor) -> Tensor:
    """What the transforms of `torch.func` have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(weight):
        weight = torch._C._functorch.get_unwrapped(weight)
    return weight


class _CastActivations(torch.autograd.Function):
    """Activations (…, K) as a format rounds them; the gradient is that of the identity."""

    @staticmethod
    def forward(x: Tensor, spec: Spec) -> Tensor:
        # blocks are those of the matrix (tokens, K)
        return cast_values(x.reshape(-1, x.shape[-1]), spec).reshape(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def extra_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """The extra tensors of a module's weight by name, e.g. {"scale": module.weight_scale}; perhaps none."""
    if not isinstance(module, FakeQuantizedLinear):
        return {}
    return {name: getattr(module, f"weight_{name}") for name in module.extra_names}


def extras_unsupported_reason(
    weight: ComputeWeight, owners: Sequence[tuple[nn.Module, str]]
) -> str | None:
    """Why these modules, given by (module, name of the parameter), cannot train by the rule of `weight`."""
    if not rule_name(weight.matmuls.output):
        return None
    fitting = [module for module, name in owners if _reads_extras(module, name)]
    if not fitting:
        return (
            f"the fake-quantize rule {rule_name(weight.matmuls.output)!r} reads further parameters, which "
            f"the forward of nn.Linear hands to it, and that of {type(owners[0][0]).__name__} does not"
        )
    try:
        made = _initial(weight)
    except QuantizationError as error:
        return str(error)
    for name in made:
        if any(hasattr(module, f"weight_{name}") for module in fitting):
            return (
                f"its module has an attribute 'weight_{name}' already, the name of an extra tensor"
            )
    return None


def fit_extras(owners: Sequence[tuple[nn.Module, str]]) -> Callable[[], None]:
    """Give modules the extra tensors that the rule of their weight reads, or take away what none reads.

    All owners of one weight get the same parameters. Returns what undoes it.

    Raises:
        QuantizationError: the rule cannot serve the format.
        UnknownNameError: nobody registered the rule.
    """
    modules = [module for module, name in owners if _reads_extras(module, name)]
    before = [(module, type(module), extra_tensors(module)) for module in modules]

    def undo() -> None:
        for module, kind, extras in before:
            _take_away(module)
            if extras:
                _give(module, extras)
            module.__class__ = kind

    if modules:
        weight: Any = local_shard(modules[0].weight)
        wanted = isinstance(weight, ComputeWeight) and bool(rule_name(weight.matmuls.output))
        learns = bool(modules[0].weight.requires_grad)
        extras = (
            {
                name: nn.Parameter(value, requires_grad=learns)
                for name, value in _initial(weight).items()
            }
            if wanted
            else {}
        )
        for module in modules:
            _take_away(module)
            if wanted:
                _give(module, extras)
    return undo


def _reads_extras(module: nn.Module, name: str) -> bool:
    """Whether it is an `nn.Linear`, and no subclass with a forward of its own, and this is its weight."""
    return type(module) in (nn.Linear, FakeQuantizedLinear) and name == "weight"


def _initial(weight: ComputeWeight) -> dict[str, Tensor]:
    spec = weight.matmuls.output
    rule = rule_of(spec)
    assert rule is not None
    assert spec is not None
    made = rule.initial(weight.memory.detach(), without_rule(spec))
    return {name: value.detach() for name, value in made.items()}


def _give(module: nn.Module, extras: dict[str, nn.Parameter]) -> None:
    module.__class__ = FakeQuantizedLinear
    module.extra_names = tuple(extras)  # type: ignore[assignment]
    for name, parameter in extras.items():
        module.register_parameter(f"weight_{name}", parameter)


def _take_away(module: nn.Module) -> None:
    for name in extra_tensors(module):
        delattr(module, f"weight_{name}")
    if isinstance(module, FakeQuantizedLinear):
        del module.extra_names
        module.__class__ = nn.Linear  # type: ignore[assignment]
