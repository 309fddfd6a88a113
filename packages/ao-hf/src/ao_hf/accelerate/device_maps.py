"""Device maps from the bytes that weights have, not from those of their logical dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import torch
from torch import Tensor, nn

from ao_core import QTensor

__all__ = ["infer_auto_device_map", "sized"]


def infer_auto_device_map(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """`accelerate.infer_auto_device_map` with the true sizes of quantized weights.

    Args:
        model: with quantized and dense weights; also on the meta device.
        args: those of accelerate's function: `max_memory`, `no_split_module_classes`, `dtype`, ….
        kwargs: the same by name. `dtype` counts for dense weights alone.
    """
    found: dict[str, Any] = accelerate.infer_auto_device_map(
        sized(model, _stored_bytes), *args, **kwargs
    )
    return found


def _stored_bytes(name: str, tensor: Tensor) -> int | None:
    return tensor.stored_bytes if isinstance(tensor, QTensor) else None


def sized(model: nn.Module, nbytes: Callable[[str, Tensor], int | None]) -> nn.Module:
    """A model of the same modules whose tensors have no memory, only sizes.

    accelerate multiplies numbers of elements by the bytes of a dtype. So a quantized weight of n bytes
    is n elements of uint8 here, on the meta device.

    Args:
        model: is not changed.
        nbytes: (name, tensor) -> its bytes; None: as dense as it is.
    """
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}

    def stand_in(name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in tensors:
            size = nbytes(name, tensor)
            made = (
                torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                if size is None
                else torch.empty(size, dtype=torch.uint8, device="meta")
            )
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[id(tensor)] = nn.Parameter(made, requires_grad=False) if is_parameter else made
        return tensors[id(tensor)]

    def shell(prefix: str, module: nn.Module) -> nn.Module:
        if id(module) not in modules:
            made = modules[id(module)] = copy.copy(module)
            for held in ("_parameters", "_buffers"):
                found = getattr(module, held).items()
                made.__dict__[held] = {
                    n: None if t is None else stand_in(prefix + n, t) for n, t in found
                }
            made.__dict__["_modules"] = {
                n: None if m is None else shell(f"{prefix}{n}.", m)
                for n, m in module._modules.items()
            }
        return modules[id(module)]

    return shell("", model)
