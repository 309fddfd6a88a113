"""Names of tensors: which belong to one weight, and what kind of model they are part of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ao_core.ext import CheckpointError
from ao_core.ext.interchange import Source

#: what AutoRound's label says; its tensors are those of other formats
AUTOROUND = "auto-round"

__all__ = ["AUTOROUND", "check_form", "modules_with", "number", "quantized_by", "simple"]


def modules_with(source: Source, *suffixes: str) -> Iterator[str]:
    """Names of the modules that have all of these tensors ("qweight", "scales"), in the order of the first."""
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


def number(config: Mapping[str, object], name: str, default: int, among: Iterable[int] = ()) -> int:
    """A whole number of a configuration.

    Raises:
        CheckpointError: it is something else, or not one of those that there are.
    """
    value, among = config.get(name, default), tuple(among)
    if type(value) is not int or (among and value not in among):
        wanted = f"one of {', '.join(map(str, among))}" if among else "a whole number"
        raise CheckpointError(f"quantization_config: {name}={value!r} must be {wanted}")
    return value


def simple(name: str) -> str:
    """A name as a regular expression that matches it alone."""
    return "^" + re.escape(name) + "$"
