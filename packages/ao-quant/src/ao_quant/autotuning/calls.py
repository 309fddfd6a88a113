"""How a model calls its layers: recorded in one run, and repeated with another weight in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.ext.calibration import Sample, answer, evaluating, tensor_of
from ao_core.ext.quantizing import Decision

__all__ = ["Use", "Uses", "bound", "record"]


@dataclass(frozen=True)
class Use:
    """Calls of one module with arguments of the same shapes and dtypes."""

    module: nn.Module
    #: of the owner within the module: "" where the module owns the parameter itself
    path: str
    #: of the parameter within its owner
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    #: how often the model made this call
    count: int

    def describe(self) -> dict[str, Any]:
        """What the time of the call depends on, ready for JSON."""
        kind = type(self.module)
        return {
            "module": f"{kind.__module__}.{kind.__qualname__}",
            "settings": self.module.extra_repr(),
            "parameter": f"{self.path}.{self.name}".lstrip("."),
            "arguments": [_form(self.args), _form(dict(self.kwargs))],
            "count": self.count,
        }


#: all uses of a parameter, by all its owners
Uses = tuple[Use, ...]


def record(model: nn.Module, sample: Sample, entries: Sequence[Decision]) -> list[Uses]:
    """The uses of each parameter while the model answers a sample; none where it is not used.

    An owner that is not called itself, such as the `out_proj` of MultiheadAttention, is used by
    the innermost module around it that is.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    around = {fqn: [fqn, *_parents(fqn)] for e in entries for fqn in map(_owner, _fqns(e))}
    watched = {name: names[name] for chain in around.values() for name in chain}
    calls: dict[int, dict[str, list[Any]]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen = calls.setdefault(id(module), {})
        seen.setdefault(repr((_form(args), _form(kwargs))), [args, kwargs, 0])[2] += 1

    with ExitStack() as stack:
        for module in {id(m): m for m in watched.values()}.values():
            handle = module.register_forward_pre_hook(note, with_kwargs=True)
            stack.callback(handle.remove)
        answer(model, sample, name="example_input")
    found = [
        tuple(
            Use(names[caller], owner[len(caller) :].lstrip("."), target.name, args, kwargs, count)
            for target in entry.owners
            for owner in [_owner(target.fqn)]
            for caller in [next((n for n in around[owner] if id(names[n]) in calls), None)]
            if caller is not None
            for args, kwargs, count in calls[id(names[caller])].values()
        )
        for entry in entries
    ]
    with evaluating(model):
        return [
            tuple(use for use in uses if not use.path or _depends(use, entry.tensor))
            for entry, uses in zip(entries, found, strict=True)
        ]


def _depends(use: Use, parameter: Tensor) -> bool:
    """Whether the answer of a module around the owner has anything to do with the parameter."""
    out = tensor_of(bound(use, torch.full_like(parameter, torch.nan))())
    return not out.is_floating_point() or bool(out.isnan().any())


def bound(use: Use, parameter: Tensor, *, compiled: bool = False) -> Callable[[], Any]:
    """The call of a use with this parameter in place.

    The module itself is not touched: modules on the way to the parameter are copied, without what
    they hold.
    """
    module = _with(use.module, use.path, use.name, parameter)

    def call() -> Any:
        return module(*use.args, **use.kwargs)

    if not compiled:
        return call
    # code of its own: what torch.compile traced is kept by code, and only a few times for each
    call.__code__ = call.__code__.replace(co_name=f"call_{id(call)}")
    return torch.compile(call, dynamic=False)  # type: ignore[no-any-return,unused-ignore]


def _with(module: nn.Module, path: str, name: str, parameter: Tensor) -> nn.Module:
    clone = copy.copy(module)
    if path:
        child, _, rest = path.partition(".")
        inner = _with(module._modules[child], rest, name, parameter)  # type: ignore[arg-type]
        clone.__dict__["_modules"] = {**module._modules, child: inner}
    else:
        clone.__dict__["_parameters"] = {**module._parameters, name: parameter}
    return clone


def _fqns(entry: Decision) -> list[str]:
    return [owner.fqn for owner in entry.owners]


def _owner(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _parents(fqn: str) -> list[str]:
    """Names of the modules around a module, innermost first; the model itself is the last."""
    parts = fqn.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, -1, -1)] if fqn else []


def _form(value: Any) -> Any:
    """Shapes and dtypes of what a module is called with; other values by their type or themselves."""
    if isinstance(value, Tensor):
        order = "" if value.is_contiguous() else f" {value.stride()}"
        return f"{value.dtype}{list(value.shape)}{order}".removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): _form(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_form(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__qualname__
