"""Saving through an `Accelerator`: models, and the checkpoints of a training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import accelerate
from accelerate.utils import align_module_device, has_offloaded_params
from torch import Tensor, nn

from ao_core import open_checkpoint
from ao_core.ext import CheckpointError
from ao_core.ext.kernels import is_sharded
from ao_core.ext.saving import Owner, gathered, natural, owners_of, untie, write_checkpoint
from ao_hf.accelerate.stored import has_checkpoint

__all__ = ["register_checkpoints", "save_model"]


def save_model(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
) -> None:
    """`Accelerator.save_model` for models with quantized weights.

    All processes must call it; the main one writes. Weights that are sharded are gathered, and those that
    are offloaded are read, one file's worth at a time. `ao_core.load_model`, or
    `load_checkpoint_and_dispatch` of this module, reads the folder.

    Args:
        accelerator: the one that prepared the model.
        model: prepared or not, dispatched, offloaded, or sharded by FSDP2.
        save_directory: created where it does not exist; a checkpoint in it is replaced.
        max_shard_size: bytes, or "200MB", "5GB".

    Raises:
        CheckpointError: a tensor cannot be saved, or the disk is full; what was there is unchanged.
    """
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    if any(has_offloaded_params(module) for module in plain.modules()):
        if accelerator.is_main_process:
            ties = _ties_of(plain)
            write_checkpoint(
                _read_offloaded(plain, ties),
                save_directory,
                ties=ties,
                max_shard_size=max_shard_size,
            )
    else:
        sharded = any(is_sharded(parameter) for parameter in plain.parameters())
        tensors = _gathered(plain) if sharded else accelerator.get_state_dict(plain)
        if accelerator.is_main_process:
            _write(tensors, save_directory, max_shard_size)
    accelerator.wait_for_everyone()


def register_checkpoints(accelerator: accelerate.Accelerator) -> Callable[[], None]:
    """Let `Accelerator.save_state` and `load_state` take models with quantized weights.

    Each model goes to a checkpoint of ao in a folder `ao_model_0`, `ao_model_1`, … of the state's folder,
    in place of accelerate's own file. Loading copies into the parameters there are, so optimizers go on
    with them. Models that FSDP2 shards are saved by `torch.distributed.checkpoint`, as without this.

    Returns:
        A function that takes the hooks away again.
    """

    def save(models: list[nn.Module], weights: list[Mapping[str, Tensor]], output_dir: str) -> None:
        for number, tensors in enumerate(weights):
            if accelerator.is_main_process:
                _write(tensors, _folder(output_dir, number))
        weights.clear()  # what is in the list, accelerate saves itself

    def load(models: list[nn.Module], input_dir: str) -> None:
        if not all(has_checkpoint(_folder(input_dir, n)) for n in range(len(models))):
            return  # saved without these hooks: accelerate's own files
        for number, model in enumerate(models):
            checkpoint = open_checkpoint(_folder(input_dir, number))
            names = (*checkpoint.entries, *checkpoint.ties)
            model.load_state_dict({name: checkpoint.load(name) for name in names})
        models.clear()

    handles = (
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    )

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _folder(state_dir: str, number: int) -> Path:
    return Path(state_dir) / f"ao_model_{number}"


def _write(
    tensors: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
) -> None:
    kept, ties = untie({name: tensors[name] for name in sorted(tensors, key=natural)})
    write_checkpoint(kept.items(), folder, ties=ties, max_shard_size=max_shard_size)


def _gathered(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model that FSDP2 shards, whole and on the CPU of each process.

    The gathering of torch, which accelerate calls, makes quantized weights dense.
    """
    return {name: gathered(tensor).detach().cpu() for name, tensor in model.state_dict().items()}


# -- offloaded models --------------------------------------------------------------------------------


def _ordered(model: nn.Module) -> list[Owner]:
    return sorted((o for o in owners_of(model) if o.persistent), key=lambda o: natural(o.fqn))


def _ties_of(model: nn.Module) -> dict[str, str]:
    """Names of a parameter that has an earlier name already."""
    first: dict[int, str] = {}
    ties = {}
    for owner in _ordered(model):
        kept = first.setdefault(id(owner.tensor), owner.fqn)
        if kept != owner.fqn:
            ties[owner.fqn] = kept
    return ties


def _read_offloaded(model: nn.Module, ties: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model by name, each read as its hook does it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for owner in _ordered(model):
        if owner.fqn in ties:
            continue
        tensor = owner.tensor
        if tensor.is_meta:
            with align_module_device(_hooked(modules, owner), "cpu"):
                tensor = getattr(owner.module, owner.name)
        if tensor.is_meta:
            raise CheckpointError(
                f"{owner.fqn} has no values: nothing offloaded them; load it first"
            )
        yield owner.fqn, tensor


def _hooked(modules: Mapping[str, nn.Module], owner: Owner) -> nn.Module:
    """The module whose hook brings a tensor: its own, or one around it that brings all that is within."""
    name = owner.fqn
    while name:
        name = name.rpartition(".")[0]
        if has_offloaded_params(modules[name]):
            return modules[name]
    return owner.module
