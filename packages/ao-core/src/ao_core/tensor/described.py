"""The line of a module in `print(model)`: which of its parameters are quantized, and how.

`nn.Module.__repr__` asks `extra_repr`; a module with quantized parameters gets one of its own, so that
its class stays what it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.sharding import local_shard
from ao_core.tensor.wrapper import Wrapper

__all__ = ["describe", "undescribe"]

_NAME = "extra_repr"


class _Description:
    """An `extra_repr` that follows its module through deepcopy and pickle, and does not keep it alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> str:
        module = self._module()
        if module is None:
            return ""
        return ", ".join(filter(None, [type(module).extra_repr(module), *_notes(module)]))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Description:
        module = self._module()
        # the copy is in the memo before its attributes are
        return self if module is None else _Description(memo.get(id(module), module))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Description, (self._module(),)


def _notes(module: nn.Module) -> Iterator[str]:
    for name, parameter in module._parameters.items():
        tensor = local_shard(parameter)
        if isinstance(tensor, QTensor):
            yield f"{name}={tensor.spec}"
        elif isinstance(tensor, Wrapper):
            yield f"{name}=({tensor.summary()})"


def describe(module: nn.Module) -> None:
    """Let `repr(module)` say how its parameters are quantized, as long as they are."""
    if not isinstance(module.__dict__.get(_NAME), _Description):
        module.__dict__[_NAME] = _Description(module)


def undescribe(module: nn.Module) -> None:
    """The inverse of `describe`."""
    if isinstance(module.__dict__.get(_NAME), _Description):
        del module.__dict__[_NAME]
