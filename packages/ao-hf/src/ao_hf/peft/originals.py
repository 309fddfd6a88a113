"""Weights as they were before quantization: from a mapping, a module or the folder of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from safetensors import safe_open
from torch import Tensor, nn

from ao_core.ext import CheckpointError, ConfigError

__all__ = ["Originals", "reader"]

#: tensors by name, a module, or the folder of a checkpoint in safetensors
Originals: TypeAlias = Mapping[str, Tensor] | nn.Module | str | PathLike[str]


def reader(originals: Originals, prefix: str = "") -> Callable[[str], Tensor]:
    """A function that gives the original of a parameter by its name, one at a time.

    Args:
        originals: where they are.
        prefix: what names in the model may begin with and names of a checkpoint may lack, as "model".
    """
    if isinstance(originals, nn.Module):
        originals = dict(originals.named_parameters(remove_duplicate=False))
    if isinstance(originals, Mapping):
        tensors = originals
        return lambda name: tensors[_found(name, prefix, tensors)]
    files = _files(Path(originals))

    def read(name: str) -> Tensor:
        key = _found(name, prefix, files)
        with safe_open(files[key], "pt") as file:
            return file.get_tensor(key)  # type: ignore[no-any-return]

    return read


def _found(name: str, prefix: str, names: Mapping[str, object]) -> str:
    short = name.removeprefix(f"{prefix}.") if prefix else name
    for key in (name, short):
        if key in names:
            return key
    raise ConfigError(
        f"originals has no {name!r}; it has {len(names)} names, as {', '.join(list(names)[:3])}"
    )


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint, in one file or in shards."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in found.items()}
    if not single.is_file():
        raise CheckpointError(
            f"originals={str(folder)!r}: there is no {index.name} and no {single.name}; name the folder "
            "of a checkpoint in safetensors"
        )
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)
