"""Weights on disk, read when a module is called: `disk_offload`, and "disk" in device maps."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import accelerate
import torch
from accelerate.utils import extract_submodules_state_dict, get_balanced_memory
from torch import Tensor, nn

from ao_core import ComputeWeight, save_model
from ao_core.ext import ConfigError, QuantizationError
from ao_core.ext.saving import owners_of, write_checkpoint
from ao_hf.accelerate.device_maps import infer_auto_device_map, sized
from ao_hf.accelerate.stored import StoredWeights, has_checkpoint, is_within

__all__ = ["disk_offload", "dispatch_model", "load_checkpoint_and_dispatch"]

Model = TypeVar("Model", bound=nn.Module)
Device = str | int | torch.device
_PLANS = ("auto", "balanced", "balanced_low_0", "sequential")
_IN_MEMORY = ("cpu", torch.device("cpu"))


def disk_offload(
    model: Model,
    offload_dir: str | os.PathLike[str],
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> Model:
    """`accelerate.disk_offload` for models with quantized weights.

    All parameters go to a checkpoint of ao in `offload_dir`, and then to the meta device. Each module reads
    its own when it is called, and drops them afterwards. Results have the same bits.

    Args:
        model: with values, or, where the folder has its checkpoint already, on the meta device.
        offload_dir: created where it does not exist. A checkpoint in it is used as it is.
        execution_device: where modules compute; None: that of the first parameter.
        offload_buffers: whether persistent buffers are on disk too.
        preload_module_classes: names of classes whose instances read all that is within them at once.

    Raises:
        CheckpointError: the checkpoint in the folder is of another model, or damaged.
        ConfigError: a weight is in low-precision training.
    """
    _check_offloadable(model)
    first = next(iter(model.parameters())).device
    device = first if execution_device is None else execution_device
    if not has_checkpoint(offload_dir):
        save_model(model, offload_dir)
    stored = StoredWeights(offload_dir, "cpu" if device == torch.device("meta") else device)
    stored.check_fits(model, [""])
    _freeze_stored(model, stored, [""])
    offloaded: Model = accelerate.cpu_offload(
        model,
        execution_device=stored.device,
        offload_buffers=offload_buffers,
        state_dict=stored,
        preload_module_classes=preload_module_classes,
    )
    return offloaded


def dispatch_model(
    model: Model,
    device_map: dict[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Model:
    """`accelerate.dispatch_model` for models with quantized weights, also where modules are on disk.

    Args:
        model: with values; modules on "disk" may be on the meta device where `offload_dir` has them.
        device_map: name of a module -> device, "cpu" or "disk".
        main_device: where modules that are offloaded compute; None: as accelerate chooses.
        state_dict: tensors of the modules on the CPU; None: those of the model.
        offload_dir: for modules on disk: created where it does not exist. A checkpoint in it is used as it
            is.
        options: further arguments of accelerate's function.

    Raises:
        ConfigError: a module is on disk, and `offload_dir` is missing, or `offload_index` is given, or a
            weight is in low-precision training.
        CheckpointError: the checkpoint in the folder is of another model, or damaged.
    """
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    if not on_disk:
        given = {"main_device": main_device, "state_dict": state_dict, "offload_dir": offload_dir}
        dispatched: Model = accelerate.dispatch_model(model, device_map, **given, **options)
        return dispatched
    _check_offloadable(model)
    if offload_dir is None:
        raise ConfigError(
            f'offload_dir=None: the device map has {on_disk[0]!r} on "disk"; give a folder for it'
        )
    if options.get("offload_index"):
        raise ConfigError(
            "offload_index: quantized weights are not single arrays; give offload_dir alone, a folder with a "
            "checkpoint of ao or for one"
        )
    real = [d for d in device_map.values() if d not in (*_IN_MEMORY, "disk")]
    main: Device = (real[0] if real else "cpu") if main_device is None else main_device
    if not has_checkpoint(offload_dir):
        _write(model, on_disk, offload_dir)
    stored = StoredWeights(offload_dir, main)
    stored.check_fits(model, on_disk)
    _freeze_stored(model, stored, on_disk)
    in_memory = [name for name, device in device_map.items() if device in _IN_MEMORY]
    kept: MutableMapping[str, Tensor] = dict(state_dict or {})
    if state_dict is None and main not in _IN_MEMORY:
        kept = extract_submodules_state_dict(model.state_dict(), in_memory)
    # of the checkpoint, which may hold the whole model, only what the map has on disk
    weights = ChainMap(kept, _Selected(stored, on_disk))  # type: ignore[arg-type]
    options["offload_index"] = {}
    offloaded: Model = accelerate.dispatch_model(model, device_map, main, weights, **options)
    return offloaded


def load_checkpoint_and_dispatch(
    model: Model,
    checkpoint: str | os.PathLike[str],
    device_map: str | dict[str, Device] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_buffers: bool = False,
    **options: Any,
) -> Model:
    """`accelerate.load_checkpoint_and_dispatch` for a checkpoint with quantized weights.

    Each tensor is read to its own device. What the map has on disk stays in the checkpoint and is read
    from there at every call, so nothing is written.

    Args:
        model: of the same architecture, usually made by `accelerate.init_empty_weights`.
        checkpoint: what `ao_core.save_model`, `save_model` of this module or `ao quantize` wrote.
        device_map: name of a module -> device, "cpu" or "disk"; "auto", "balanced", "balanced_low_0" or
            "sequential": by the sizes in the checkpoint; None: everything on the CPU, without hooks.
        max_memory: device -> bytes, or "10GB".
        no_split_module_classes: names of classes whose instances stay on one device.
        offload_buffers: whether persistent buffers of offloaded modules are offloaded too.
        options: further arguments of `accelerate.dispatch_model`.

    Raises:
        CheckpointError: there is no usable checkpoint, or it does not fit the model.
        ConfigError: `device_map` is a name that is unknown.
    """
    if isinstance(device_map, str) and device_map not in _PLANS:
        raise ConfigError(
            f"device_map={device_map!r}: give one of {', '.join(_PLANS)}, or a device for each module"
        )
    stored = StoredWeights(checkpoint)
    stored.check_fits(model, [""])
    if isinstance(device_map, str):
        shell = sized(model, lambda name, _: stored.nbytes(name) if name in stored else None)
        plan: dict[str, Any] = {"no_split_module_classes": no_split_module_classes}
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = get_balanced_memory(shell, max_memory, low_zero=low_zero, **plan)
        device_map = infer_auto_device_map(
            shell, max_memory, offload_buffers=offload_buffers, **plan
        )
    places: dict[str, Device] = {"": "cpu"} if device_map is None else device_map
    on_disk = [name for name, device in places.items() if device == "disk"]
    _load(model, stored, on_disk)
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=checkpoint if on_disk else None,
        offload_buffers=offload_buffers,
        **options,
    )


class _Selected(Mapping[str, Tensor]):
    """The tensors of a checkpoint that are in some modules."""

    def __init__(self, stored: StoredWeights, modules: list[str]) -> None:
        self.stored, self.modules = stored, modules

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        return self.stored[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.stored and is_within(name, self.modules)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.stored if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _check_offloadable(model: nn.Module) -> None:
    """Raise `ConfigError` for weights in low-precision training, whose class alone does not make another."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ComputeWeight):
            raise ConfigError(
                f"{name} is in low-precision training ({parameter.summary()}), and accelerate makes "
                "offloaded parameters anew from their values; call ao_core.ext.compute.unwrap_(model) first"
            )


def _write(model: nn.Module, modules: list[str], folder: str | os.PathLike[str]) -> None:
    """Write the parameters and persistent buffers of some modules as a checkpoint."""
    held = {o.fqn: o.tensor for o in owners_of(model) if o.persistent and is_within(o.fqn, modules)}
    if missing := [name for name, tensor in held.items() if tensor.is_meta]:
        raise QuantizationError(
            f"{missing[0]} is on the meta device and {os.fspath(folder)} has no checkpoint; load the model "
            "first, or give the folder of its checkpoint"
        )
    write_checkpoint(held.items(), folder)


def _freeze_stored(model: nn.Module, stored: StoredWeights, modules: list[str]) -> None:
    """Let parameters that are quantized on disk ask for no gradient, as `quantize_` leaves them."""
    for owner in owners_of(model):
        name = owner.fqn
        if name in stored and is_within(name, modules) and stored.is_quantized(name):
            owner.tensor.requires_grad_(False)


def _load(model: nn.Module, stored: StoredWeights, on_disk: list[str]) -> None:
    """Put the tensors that are not on disk into the model; those that are tied stay one."""
    loaded: dict[tuple[str, bool], Tensor] = {}
    for owner in list(owners_of(model)):
        if not owner.persistent or is_within(owner.fqn, on_disk):
            continue
        entry = stored.checkpoint.ties.get(owner.fqn, owner.fqn)
        key = (entry, owner.is_parameter)
        if key not in loaded:
            tensor = stored[entry]
            learns = owner.tensor.requires_grad and not stored.is_quantized(entry)
            loaded[key] = (
                nn.Parameter(tensor, requires_grad=learns) if owner.is_parameter else tensor
            )
        owner.put(loaded[key])
