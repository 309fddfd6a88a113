"""Further tensors of a `ComputeWeight`, which its module has as parameters.

They are parameters of the *module*, called after the weight: "weight_scale" beside "weight". So everything
that knows parameters knows them: optimizers, `state_dict`, `.to`, deepcopy, FSDP2, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ao_core.compute.fake_quantize import format_of, rule_of
from ao_core.compute.weight import ComputeWeight
from ao_core.errors import QuantizationError
from ao_core.tensor.sharding import local_shard

__all__ = [
    "extra_tensors",
    "extras_unsupported_reason",
    "fit_extras",
    "freezes",
    "give_extras",
    "take_extras",
]


def extra_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """The extra tensors of a module's weight by name, e.g. {"scale": module.weight_scale}; perhaps none."""
    return {name: getattr(module, f"weight_{name}") for name in getattr(module, "extra_names", ())}


def freezes(tensor: Tensor) -> bool:
    """Whether it is a weight whose rule trains the extra tensors alone."""
    rule = rule_of(tensor.matmuls.output) if isinstance(tensor, ComputeWeight) else None
    return rule is not None and rule.freezes


def extras_unsupported_reason(
    weight: ComputeWeight, owners: Sequence[tuple[nn.Module, str]]
) -> str | None:
    """Why these modules, given by (module, name of the parameter), cannot train by the rule of `weight`."""
    rule = rule_of(weight.matmuls.output)
    if rule is None or rule.initial is None:
        return None
    fitting = [module for module, name in owners if _reads_extras(module, name)]
    if not fitting:
        return (
            f"the fake-quantize rule {rule.name!r} reads further parameters, which "
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
            take_extras(module)
            if extras:
                give_extras(module, extras)
            module.__class__ = kind

    if modules:
        weight: Any = local_shard(modules[0].weight)
        rule = rule_of(weight.matmuls.output) if isinstance(weight, ComputeWeight) else None
        wanted = rule is not None and rule.initial is not None
        learns = bool(modules[0].weight.requires_grad) or (rule is not None and rule.freezes)
        extras = (
            {
                name: nn.Parameter(value, requires_grad=learns)
                for name, value in _initial(weight).items()
            }
            if wanted
            else {}
        )
        for module in modules:
            take_extras(module)
            if wanted:
                give_extras(module, extras)
    return undo


def _reads_extras(module: nn.Module, name: str) -> bool:
    """Whether it is an `nn.Linear`, and no subclass with a forward of its own, and this is its weight."""
    return name == "weight" and (type(module) is nn.Linear or hasattr(module, "extra_names"))


def _initial(weight: ComputeWeight) -> dict[str, Tensor]:
    spec = weight.matmuls.output
    rule = rule_of(spec)
    assert rule is not None
    assert rule.initial is not None
    assert spec is not None
    made = rule.initial(weight.memory.detach(), format_of(spec))
    return {name: value.detach() for name, value in made.items()}


def give_extras(module: nn.Module, extras: dict[str, nn.Parameter]) -> None:
    """Make an `nn.Linear` one whose forward reads these tensors, parameters "weight_" and their names."""
    # its module imports torch's compiler, which who never learns a scale should not wait for
    from ao_core.compute.fake_linear import FakeQuantizedLinear

    module.__class__ = FakeQuantizedLinear
    module.extra_names = tuple(extras)  # type: ignore[assignment]
    for name, parameter in extras.items():
        module.register_parameter(f"weight_{name}", parameter)


def take_extras(module: nn.Module) -> None:
    """The inverse: an `nn.Linear` without extra tensors."""
    for name in extra_tensors(module):
        delattr(module, f"weight_{name}")
    if hasattr(module, "extra_names"):
        del module.extra_names
        module.__class__ = nn.Linear
