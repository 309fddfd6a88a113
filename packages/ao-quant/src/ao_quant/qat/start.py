"""A prepared model that starts where a calibrated algorithm ended."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ao_core import ComputeWeight, QTensor
from ao_core.ext import ConfigError
from ao_core.ext.compute import extra_tensors, points_of
from ao_quant.qat.delay import check_prepared

__all__ = ["start_from_"]


@torch.no_grad()
def start_from_(model: nn.Module, quantized: nn.Module) -> list[str]:
    """Give a prepared model the values of a quantized one, such as GPTQ's, and its learned scales theirs.

    With `scales="learned"` it computes what the quantized model does, so that training begins with that loss.
    With `scales="chosen"` scales are chosen from the values, which are on the grid already; those of blocks
    that do not use the whole range change.

    Args:
        model: prepared by `QATConfig`, in place.
        quantized: the same model, quantized with the same base, perhaps by an algorithm with data. Parameters
            that it did not quantize are copied as they are.

    Returns:
        The names of the weights that start on the quantized values.

    Raises:
        ConfigError: no weight of `model` is prepared, its modules are others, or a weight is quantized to
            another number format or in other blocks. The model is as it was then.
    """
    check_prepared(model)
    changes: list[tuple[Tensor, Tensor]] = []
    names = []
    others = dict(quantized.named_modules())
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            fqn = f"{prefix}.{name}" if prefix else name
            if name.removeprefix("weight_") in extra_tensors(module):
                continue
            other = getattr(others.get(prefix), name, None)
            if not isinstance(other, Tensor) or other.shape != parameter.shape:
                raise ConfigError(f"quantized: it has no {fqn} of shape {tuple(parameter.shape)}")
            if not isinstance(other, QTensor):
                changes.append((parameter, other))
                continue
            spec = parameter.matmuls.output if isinstance(parameter, ComputeWeight) else None
            if spec is None or (spec.dtype, spec.block) != (other.spec.dtype, other.spec.block):
                raise ConfigError(
                    f"quantized: {fqn} is {other.spec}, and {spec or 'not prepared'} in the model; use "
                    "the same base for both"
                )
            names.append(fqn)
            changes.append((parameter, other.dequantize()))
            extras = extra_tensors(module)
            if "scale" in extras:
                scale, offset = points_of(other)
                changes.append((extras["scale"], scale))
                if "offset" in extras and offset is not None:
                    changes.append((extras["offset"], offset))
    for target, value in changes:
        target.copy_(value)
    return names
