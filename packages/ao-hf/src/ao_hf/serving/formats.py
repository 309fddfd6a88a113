"""Which weights of a folder are quantized, by the names that an engine gives its layers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ao_core import Spec, open_checkpoint
from ao_core.ext import ROW, SHARED, CheckpointError, QuantizationError, UnsupportedOp, registry

__all__ = [
    "PART",
    "PART_IN_ENGINE",
    "Formats",
    "engine_name",
    "formats_of",
    "unservable",
]

#: a part on disk: the name of a weight, and of its part
PART = re.compile(r"(?<!parametrizations)\.weight\.([A-Za-z]\w*)$")
#: what it becomes in an engine
PART_IN_ENGINE = r".weight_\1"


def engine_name(name: str) -> str:
    """The name of a parameter for a tensor of a file: `X.weight.scale` becomes `X.weight_scale`.

    Names of parameters hold no dots, so a layer that has a `weight` cannot have a `weight.scale`.
    """
    return PART.sub(PART_IN_ENGINE, name)


@dataclass(frozen=True)
class Formats:
    """The formats of a folder."""

    folder: str
    #: by the name of a parameter, e.g. "model.layers.0.self_attn.q_proj.weight"
    specs: Mapping[str, Spec]
    #: names of all other weights
    dense: frozenset[str] = field(default_factory=frozenset)

    def of_layer(self, prefix: str, packed: Mapping[str, Sequence[str]]) -> Spec | None:
        """The format of an engine's layer, or None where it is dense.

        Args:
            prefix: the name of the layer, e.g. "model.layers.0.self_attn.qkv_proj".
            packed: which layers of the folder an engine joins, e.g. {"qkv_proj": ["q_proj", …]}.

        Raises:
            QuantizationError: layers that are joined have different formats.
            CheckpointError: the folder has no such layer.
            UnsupportedOp: an engine cannot split or join the format.
        """
        parent, dot, last = prefix.rpartition(".")
        names = [f"{parent}{dot}{own}.weight" for own in packed.get(last, [last])]
        unknown = [n for n in names if n not in self.specs and n not in self.dense]
        if len(unknown) == len(names):
            # the folder may hold the joined layer itself, as Phi-3's do
            names = [f"{prefix}.weight"]
            if names[0] not in self.specs and names[0] not in self.dense:
                raise CheckpointError(f"{self.folder}: has no weight of the layer {prefix!r}")
        specs = {name: self.specs.get(name) for name in names}
        if len(set(specs.values())) > 1:
            shown = ", ".join(f"{name}: {spec or 'dense'}" for name, spec in specs.items())
            raise QuantizationError(
                f"{prefix} joins layers of different formats ({shown}); quantize them alike"
            )
        spec = specs[names[0]]
        if spec is not None and (reason := unservable(spec)):
            raise UnsupportedOp(f"{prefix} ({spec}): {reason}")
        return spec

    def renamed(self, mapper: Any) -> Formats:
        """The same under the names of an engine's model, by its `WeightsMapper`."""
        specs, dense = mapper.apply_dict(dict(self.specs)), mapper.apply_list(sorted(self.dense))
        return Formats(self.folder, specs, frozenset(dense))

    def quantized_below(self, prefix: str) -> list[str]:
        """Names of quantized weights of a module and what is in it."""
        return [name for name in self.specs if name.startswith(f"{prefix}.")]


def formats_of(folder: str | os.PathLike[str]) -> Formats:
    """Read the formats from the headers of the files of a folder.

    Raises:
        CheckpointError: it is no local folder, ao did not write its files, or a plugin is missing.
    """
    if not Path(folder).is_dir():
        raise CheckpointError(
            f"{os.fspath(folder)}: is no local folder; download the model first "
            "(huggingface_hub.snapshot_download) and serve the folder"
        )
    checkpoint = open_checkpoint(folder)
    if missing := checkpoint.missing_providers():
        raise CheckpointError(f"{checkpoint.path}: needs {'; and '.join(missing)}")
    if not checkpoint.records:
        raise CheckpointError(f"{checkpoint.path}: no tensor is quantized by ao")
    entries = {name: entry.spec for name, entry in checkpoint.entries.items()}
    for name, owner in checkpoint.ties.items():
        entries[name] = entries[owner]
    specs = {name: spec for name, spec in entries.items() if spec is not None}
    return Formats(str(folder), specs, frozenset(entries.keys() - specs.keys()))


def unservable(spec: Spec) -> str | None:
    """None, or why engines cannot load a format: they cut and join every part row by row."""
    if isinstance(spec.scale_dtype, Spec):
        return "its scales are quantized too (double quantization); use a recipe without"
    if spec.is_static or (spec.act is not None and spec.act.is_static):
        return "static activations have one scale for several layers that an engine joins"
    if spec.input:
        return "activations go through input steps first, which joined layers do not share"
    rows, columns = 64, 1024
    if len(spec.block) > 2 or spec.block[-1] > columns:
        return f"block={spec.block}: blocks of rows or of more than {columns} columns"
    layout, dtype = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    for name, axes in layout.geometry(spec, (rows, columns), dtype).items():
        if not axes or axes[0] is SHARED or tuple(axes[0]) != (1, 1):
            return f"rows share the part {name!r}, so layers cannot be joined; use {ROW} or groups"
    return None
