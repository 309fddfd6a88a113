"""Masks that stay with a model, as buffers next to the parameters, and after every optimizer step.

The mask of `weight` is the buffer `weight_sparsity_mask` of the same module, so that it is copied, moved,
saved and loaded with the model, and the parameter stays the plain one that other code expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import Config
from ao_core.ext import ConfigError, QuantizationError, checked, checked_but, is_converted, shown
from ao_core.ext.kernels import is_sharded, local_shard
from ao_core.ext.quantizing import FilterFn
from ao_sparsity.prune.magnitude import prune_magnitude
from ao_sparsity.prune.patterns import NofM
from ao_sparsity.prune.result import PruneReport, Pruning

__all__ = ["apply_fake_sparsity", "apply_masks", "attach_masks", "keep_masks", "remove_masks"]

#: what the name of a mask has after that of its parameter
SUFFIX = "_sparsity_mask"


@checked_but("pruning")
def apply_masks(model: nn.Module, pruning: Pruning | Mapping[str, Tensor]) -> None:
    """Set masked weights to zero, in place, and store the masks as buffers of the model.

    If the method changed the remaining weights, their new values are set, too. Parameters stay the same
    objects, so existing optimizers continue to work. New masks replace old ones.

    Args:
        model: the model, also one that is sharded since.
        pruning: what a method found, or the masks: name of a parameter -> bool, of its shape.

    Raises:
        ConfigError: a name is not there, or a mask is not of the shape or dtype. Nothing was changed then.
        QuantizationError: a parameter is quantized.
    """
    masks = pruning.masks if isinstance(pruning, Pruning) else pruning
    if not isinstance(masks, Mapping):
        raise ConfigError(f"pruning={shown(pruning)}: give a Pruning, or a mask for each name")
    weights = pruning.weights if isinstance(pruning, Pruning) else {}
    checked = {fqn: _checked(model, fqn, mask) for fqn, mask in masks.items()}
    with torch.no_grad():
        for fqn, (module, name) in checked.items():
            parameter = getattr(module, name)
            if fqn in weights:
                parameter.copy_(_beside(weights[fqn], parameter))
            _attach(module, name, masks[fqn])
            _zero(parameter, getattr(module, name + SUFFIX))


@checked
def attach_masks(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Make the buffers that a state dict has masks for, so that `load_state_dict` loads them.

    Args:
        model: a model without masks, as it was made.
        state: the state dict of one with masks.

    Returns:
        The names of the parameters that have masks now.

    Raises:
        ConfigError: it has a mask of another shape, or for a parameter that the model does not have.
    """
    names = [key.removesuffix(SUFFIX) for key in state if key.endswith(SUFFIX)]
    checked = {fqn: _checked(model, fqn, state[fqn + SUFFIX]) for fqn in names}
    for module, name in checked.values():
        pruned = getattr(module, name)
        everything = torch.ones(pruned.shape, dtype=torch.bool, device=pruned.device)
        _attach(module, name, everything)
    return names


@checked
def keep_masks(model: nn.Module, optimizer: torch.optim.Optimizer) -> ExitStack:
    """Keep masked weights at zero through all optimizer steps, whatever the momentum.

    Before each step the gradients of removed weights are set to zero, after it the weights. The masks that
    the model has at that time count, so they may change from step to step. Shards of FSDP2 (`fully_shard`)
    get the shards of their masks, and so do the buffers.

    Args:
        model: a model with masks, or one that will have some.
        optimizer: one of its parameters.

    Returns:
        What ends it: call `close()`, or use it as a context.
    """

    def before(*_: object) -> None:
        for parameter, mask in _masked(model):
            if parameter.grad is not None:
                _zero(parameter.grad, mask)

    def after(*_: object) -> None:
        for parameter, mask in _masked(model):
            _zero(parameter, mask)

    handles = ExitStack()
    handles.callback(optimizer.register_step_pre_hook(before).remove)
    handles.callback(optimizer.register_step_post_hook(after).remove)
    return handles


@checked
def remove_masks(model: nn.Module) -> list[str]:
    """Make masks permanent: removed weights stay zero, and the model becomes a plain one without masks.

    Returns:
        The names of the parameters that had masks.
    """
    names = []
    for fqn, module, name in list(_attached(model)):
        _zero(getattr(module, name), _mask_of(module, name))
        delattr(module, name + SUFFIX)
        names.append(f"{fqn}.{name}" if fqn else name)
    return names


@checked_but("pattern")
def apply_fake_sparsity(
    model: nn.Module, pattern: Config | None = None, filter_fn: FilterFn | None = None
) -> PruneReport:
    """Set weights to zero by magnitude, permanently, to see what a pattern costs. Nothing gets smaller.

    Args:
        model: changed in place.
        pattern: as for `prune_magnitude`; 2:4 by default.
        filter_fn: likewise.
    """
    found = prune_magnitude(model, NofM(2, 4) if pattern is None else pattern, filter_fn)
    apply_masks(model, found)
    remove_masks(model)
    return found.report


def _checked(model: nn.Module, fqn: str, mask: Any) -> tuple[nn.Module, str]:
    """The module and the name in it of a parameter that can have this mask."""
    path, _, name = fqn.rpartition(".")
    try:
        module = model.get_submodule(path)
        parameter = module._parameters[name]
    except (AttributeError, KeyError):
        parameter = None
    if parameter is None:
        raise ConfigError(f"pruning[{fqn!r}]: the model has no such parameter")
    if is_converted(parameter):
        raise QuantizationError(
            f"{fqn} is a {type(parameter).__name__}; apply masks to the dense model first"
        )
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != parameter.shape:
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise ConfigError(
            f"pruning[{fqn!r}] is {found}; need torch.bool {list(parameter.shape)}, as the parameter"
        )
    return module, name


def _attached(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name of the module, module, name of the parameter) of each mask."""
    for fqn, module in model.named_modules():
        for buffer in module._buffers:
            if buffer.endswith(SUFFIX):
                yield fqn, module, buffer.removesuffix(SUFFIX)


def _masked(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, its mask) of each mask."""
    for _, module, name in _attached(model):
        yield getattr(module, name), _mask_of(module, name)


def _attach(module: nn.Module, name: str, mask: Tensor) -> None:
    module.register_buffer(name + SUFFIX, _beside(mask, getattr(module, name)).clone())


def _mask_of(module: nn.Module, name: str) -> Tensor:
    """The mask of a parameter; one that was sharded after it got its mask has it sharded now."""
    mask: Tensor = getattr(module, name + SUFFIX)
    if is_sharded(getattr(module, name)) and not is_sharded(mask):
        _attach(module, name, mask)
    return getattr(module, name + SUFFIX)  # type: ignore[no-any-return]


def _beside(tensor: Tensor, parameter: Any) -> Tensor:
    """The tensor on the device of a parameter, or the shards of it where the parameter's are."""
    tensor = tensor.to(parameter.device)
    if not is_sharded(parameter) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # every rank has all of it, so nothing is sent
    return distribute_tensor(
        tensor, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


@torch.no_grad()
def _zero(tensor: Tensor, mask: Tensor) -> None:
    """Set to zero, in place, where the mask is False."""
    local_shard(tensor).masked_fill_(~local_shard(mask), 0)
