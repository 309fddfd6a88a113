"""Names of tensors: which belong to one weight, and what kind of model they are part of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ao_core.ext import CheckpointError
from ao_core.ext.interchange import Source

#: what AutoRound's label says; its tensors are those of other formats
AUTOROUND = "auto-round"

__all__ = ["AUTOROUND", "check_form", "modules_with", "quantized_by", "simple", "unlabelled"]


def modules_with(source: Source, *suffixes: str) -> Iterator[str]:
    """Names of the modules that have all of these tensors ("qweight", "scales"), in their order."""
    first = f".{suffixes[0]}"
    for name in source.forms:
        owner = name.removesuffix(first)
        if owner != name and all(f"{owner}.{suffix}" in source.forms for suffix in suffixes):
            yield owner


def quantized_by(source: Source, *methods: str) -> bool:
    """Whether the label of a source is one of these."""
    return str(source.quantization.get("quant_method", "")).lower() in methods


def check_form(
    source: Source, name: str, dtypes: Sequence[torch.dtype], shape: tuple[int | None, ...]
) -> None:
    """Raise `CheckpointError` unless a tensor is there, of one of the dtypes and of the shape; None: any."""
    if name not in source.forms:
        raise CheckpointError(f"{name} is missing")
    dtype, found = source.forms[name]
    fits = len(found) == len(shape) and all(
        b is None or a == b for a, b in zip(found, shape, strict=True)
    )
    if dtype not in dtypes or not fits:
        wanted = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        sizes = ", ".join("*" if size is None else str(size) for size in shape)
        raise CheckpointError(
            f"{name} is {str(dtype).removeprefix('torch.')} {list(found)}, and {wanted} [{sizes}] is needed"
        )


def simple(name: str) -> str:
    """A name as a regular expression that matches it alone."""
    return "^" + re.escape(name) + "$"


def unlabelled(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    """`Interchange.config` of formats that need no label in config.json."""
    return {}
