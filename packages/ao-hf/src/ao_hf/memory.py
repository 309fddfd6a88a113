"""The memory of models with quantized parameters, which libraries take for that of dense ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ao_core import QTensor
from ao_core.ext import checked
from ao_core.ext.saving import describe

__all__ = ["memory_footprint", "show_stored"]


@checked
def memory_footprint(model: nn.Module, return_buffers: bool = True) -> int:
    """Bytes of the parameters as they are stored, tied ones once, and of the buffers.

    What is on the meta device, as offloaded weights are, takes none.
    """
    total = sum(_bytes(parameter) for parameter in model.parameters())
    if return_buffers:
        total += sum(_bytes(buffer) for buffer in model.buffers())
    return total


def _bytes(tensor: Tensor) -> int:
    if tensor.is_meta:
        return 0
    data: Any = tensor
    return data.stored_bytes if isinstance(data, QTensor) else data.nbytes


class _Footprint:
    """A `get_memory_footprint` that counts what is stored, and follows its model through deepcopy."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, return_buffers: bool = True) -> int:
        return memory_footprint(self.model, return_buffers)


def show_stored(model: nn.Module) -> None:
    """Let a model print the formats of its modules, and count in `get_memory_footprint` what is stored."""
    for module in model.modules():
        if any(isinstance(parameter, QTensor) for parameter in module._parameters.values()):
            describe(module)
    model.__dict__["get_memory_footprint"] = _Footprint(model)
