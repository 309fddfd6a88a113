"""A state dict as plain tensors and text, for programs that write safetensors files themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ao_core.arguments import checked
from ao_core.errors import CheckpointError
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import repack
from ao_core.tensor.saving.header import header_of, parse_header
from ao_core.tensor.saving.leaves import PLACEHOLDER, Record, flatten, rebuild
from ao_core.tensor.saving.shards import checksum, restore, store
from ao_core.tensor.wrapper import dense_memory

__all__ = ["flat_to_state_dict", "state_dict_to_flat", "untie"]


def untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without those that share an earlier one's memory, and {name left out: kept}."""
    first: dict[Any, str] = {}
    kept, ties = {}, {}
    for name, tensor in tensors.items():
        owner = first.setdefault(_identity(tensor), name)
        if owner == name:
            kept[name] = tensor
        else:
            ties[name] = owner
    return kept, ties


def _identity(held: Tensor) -> Any:
    """Equal for two tensors that are the same memory, seen in the same way."""
    tensor: Any = dense_memory(held)
    if isinstance(tensor, QTensor):
        parts = tuple(_identity(leaf) for _, leaf in tensor.leaves())
        return parts, tensor.spec, tuple(tensor.shape), tensor.order, tensor.dtype
    if is_traceable_wrapper_subclass(tensor) or tensor.is_meta or is_lazy(tensor):
        return id(tensor)
    if tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    place = (tensor.device, tensor.data_ptr(), tensor.dtype)
    return *place, tuple(tensor.shape), tensor.stride()


@checked
def state_dict_to_flat(
    state_dict: Mapping[str, Any], *, checksums: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Plain tensors and text metadata that any writer of safetensors files takes.

    Of several files that they are split among, each needs all of the metadata.

    Args:
        state_dict: quantized and dense tensors by name.
        checksums: write a checksum of each tensor into the metadata, as `save_model` does; this takes
            about 0.3 s for 1 GB.

    Raises:
        CheckpointError: a value that is not a tensor, or of a kind that cannot be saved.
    """
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}; a checkpoint holds tensors only (no pickle)"
            )
    kept, ties = untie(state_dict)
    flat: dict[str, Tensor] = {}
    records: dict[str, Record] = {}
    for name, tensor in kept.items():
        leaves, record = flatten(name, tensor)
        if record is not None:
            records[name] = record
        if twice := flat.keys() & leaves.keys():
            raise CheckpointError(f"two tensors would be stored as {min(twice)!r}; rename one")
        flat |= leaves
    stored, raw = store(flat)
    crcs = {n: checksum(leaf.cpu()) for n, leaf in stored.items()} if checksums else {}
    return stored, header_of(records, ties, raw, crcs)


@checked
def flat_to_state_dict(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> dict[str, Tensor]:
    """Inverse of `state_dict_to_flat`; quantized tensors come in the layout of their device.

    Raises:
        CheckpointError: the metadata is malformed, a part or a plugin is missing.
    """
    header = parse_header(metadata)
    if missing := [text for p in header.providers if (text := p.missing())]:
        raise CheckpointError(f"the tensors need {'; and '.join(missing)}")
    left = dict(tensors)
    out: dict[str, Tensor] = {}
    try:
        for name, form in header.raw.items():
            left[name] = restore(left[name], form)
        for name, record in header.records.items():
            out[name] = repack(rebuild(name, record, left.pop))
            own = left.pop(name, None)
            if own is not None and (own.dtype, tuple(own.shape)) != PLACEHOLDER:
                raise CheckpointError(
                    f"{name!r} is there twice: as parts, and as {tuple(own.shape)}"
                )
        out |= left
        return out | {name: out[owner] for name, owner in header.ties.items()}
    except KeyError as error:
        raise CheckpointError(f"{error.args[0]!r} is missing among the tensors") from error
