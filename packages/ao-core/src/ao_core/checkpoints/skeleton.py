"""A stand-in for the model that a checkpoint is of: modules guessed from names, without computation.

It exists so that `quantize_`'s rules (which parameters, why not, what a transform may see of the owner)
hold for a checkpoint whose model is not at hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ao_core.checkpoints.tied_head import HEAD, tied_embedding
from ao_core.errors import CheckpointError
from ao_core.tensor.saving import Checkpoint, Entry

__all__ = ["is_dense", "is_embedding", "make_skeleton"]

_EMBEDDING = re.compile(r"embed|^wte$|^wpe$|^shared$|relative_attention_bias", re.IGNORECASE)
_NORM = re.compile(r"norm|^ln(_|$)|(^|_)ln$|^ln\d", re.IGNORECASE)
_CONV = re.compile(r"conv", re.IGNORECASE)
_MHA = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
#: modules inside one another, at most
_DEPTH = 64
_CONVS: dict[int, Callable[..., nn.Module]] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
#: what a weight may be stored in before it is quantized
_DENSE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_embedding(fqn: str) -> bool:
    """Whether the owner of this parameter is called like an embedding."""
    owner = fqn.rpartition(".")[0].rpartition(".")[2]
    return _EMBEDDING.search(owner) is not None


def is_dense(entry: Entry) -> bool:
    """Whether a tensor of a checkpoint has values that could be quantized."""
    return entry.spec is None and entry.dtype in _DENSE


def make_skeleton(checkpoint: Checkpoint) -> nn.Module:
    """Modules that own a meta tensor for each of the checkpoint; only dense floats as parameters.

    Raises:
        CheckpointError: names that no model has.
    """
    names = dict(checkpoint.entries)
    names |= {n: replace(checkpoint.entries[owner], fqn=n) for n, owner in checkpoint.ties.items()}
    owned: dict[str, list[Entry]] = {}
    for entry in names.values():
        owned.setdefault(entry.fqn.rpartition(".")[0], []).append(entry)
    root = nn.Module()
    tensors: dict[str, Tensor] = {}
    # a module is made before its children
    for path in sorted(owned, key=lambda path: path.count(".")):
        module = _put_module(root, path, _module(path, owned[path])) if path else root
        for entry in owned[path]:
            owner = checkpoint.ties.get(entry.fqn, entry.fqn)
            tensor = tensors.setdefault(owner, _stand_in(entry))
            table = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
            table[entry.fqn.rpartition(".")[2]] = tensor  # type: ignore[assignment]
    embeddings = [name for name in checkpoint.entries if is_embedding(name)]
    if (tied := tied_embedding(checkpoint, embeddings)) is not None:
        rows, columns = checkpoint.entries[tied].shape
        head = _put_module(root, HEAD, nn.Linear(columns, rows, bias=False, device="meta"))
        head._parameters["weight"] = tensors[tied]  # type: ignore[assignment]
    return root


def _module(path: str, entries: list[Entry]) -> nn.Module:
    """A module of the class that would own such tensors, stripped of tensors and children."""
    made = _guess(path.rpartition(".")[2], path, {e.fqn.rpartition(".")[2]: e for e in entries})
    made._parameters.clear()
    made._buffers.clear()
    made._modules.clear()
    return made


def _guess(name: str, path: str, tensors: dict[str, Entry]) -> nn.Module:
    projection = next((tensors[n] for n in _MHA if n in tensors), None)
    if projection is not None and len(projection.shape) == 2 and all(projection.shape):
        return nn.MultiheadAttention(projection.shape[-1], 1, device="meta")
    weight = tensors.get("weight")
    if weight is None or _NORM.search(name) or not all(weight.shape):
        return nn.Module()
    shape = weight.shape
    if len(shape) == 2:
        if is_embedding(weight.fqn):
            return nn.Embedding(shape[0], shape[1], device="meta")
        return nn.Linear(shape[1], shape[0], bias=False, device="meta")
    # other 3-D weights are those of fused experts
    if len(shape) in (4, 5) or (len(shape) == 3 and _CONV.search(path)):
        return _CONVS[len(shape)](shape[1], shape[0], shape[2:], device="meta")
    return nn.Module()


def _put_module(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    *parents, name = path.split(".")
    if len(parents) > _DEPTH:
        raise CheckpointError(
            f"{path!r:.80}… has more than {_DEPTH} dots, and no model has such names"
        )
    parent = root
    for part in parents:
        child = parent._modules.get(part)
        if child is None:
            child = parent._modules[part] = nn.Module()
        parent = child
    parent._modules[name] = module
    return module


def _stand_in(entry: Entry) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    return nn.Parameter(tensor, requires_grad=False) if is_dense(entry) else tensor
