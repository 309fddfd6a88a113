"""A hash of calibration data, by which it is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ao_core.calibration.samples import Sample

__all__ = ["digest"]


def digest(batches: Sequence[Sample]) -> str:
    """A hash of all values of the data."""
    sha = hashlib.sha256()
    for batch in batches:
        leaves, structure = pytree.tree_flatten(
            dict(batch) if isinstance(batch, Mapping) else batch
        )
        sha.update(str(structure).encode())
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                sha.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
                flat = leaf.detach().cpu().contiguous().reshape(-1)
                sha.update(flat.view(torch.uint8).numpy().tobytes())
            else:
                sha.update(repr(leaf).encode())
    return sha.hexdigest()
