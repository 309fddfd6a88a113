"""Records for checkpoints of other projects: how one is known, read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ao_core.arguments import check_fields

if TYPE_CHECKING:
    from ao_core.tensor.qtensor import QTensor

__all__ = ["Container", "ForeignWeight", "Interchange", "Reading", "Source", "Written"]

#: dtype and shape of a plain tensor
Form = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Source:
    """A checkpoint as a reader sees it: what its headers and texts say; tensors are read when asked for."""

    #: dtype and shape of every plain tensor, by name
    forms: Mapping[str, Form]
    #: a plain tensor by its name, on the CPU; its own memory
    take: Callable[[str], Tensor]
    #: config.json; empty where there is none
    config: Mapping[str, Any] = field(default_factory=dict)
    #: what says how it is quantized, in config.json or in a file of its own; empty where nothing does
    quantization: Mapping[str, Any] = field(default_factory=dict)
    #: texts in the headers of the safetensors files, of all files together
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model, as config.json says; float16 where it does not."""
        for config in (self.config, self.config.get("text_config") or {}):
            name = config.get("dtype", config.get("torch_dtype"))
            found = (
                getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
            )
            if isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1:
                return found
        return torch.float16


@dataclass(frozen=True)
class ForeignWeight:
    """One quantized weight of a source."""

    #: the plain tensors that it is made of
    names: tuple[str, ...]
    #: reads them and gives the tensor; raises `CheckpointError` where they are no such weight
    make: Callable[[], QTensor]
    #: what `Interchange.write` needs to write the same bytes again; JSON-ready
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Reading:
    """What a reader found in a source."""

    #: the quantized weights, by the name of the parameter
    weights: Mapping[str, ForeignWeight]
    #: weights that are quantized in a way that cannot be read, and why, by the name of the parameter
    refused: Mapping[str, str] = field(default_factory=dict)
    #: what is not as labels say, a sentence each
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Written:
    """One weight as another project stores it."""

    #: plain tensors by their names in the checkpoint
    tensors: Mapping[str, Tensor]
    #: what `Interchange.config` must know of it; JSON-ready
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: what the format has no place for, a sentence each
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)


def _plain(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {"format": "pt"}


@dataclass(frozen=True)
class Container:
    """Files that are no safetensors files, each of which is a whole checkpoint."""

    #: how their names end: ".gguf"
    suffix: str
    #: (a file) -> what a reader sees of it, names as those of parameters. Raises `CheckpointError` where it
    #: is damaged
    open: Callable[[Path], Source]
    #: (the file to write, all tensors with the config.json of the source, settings of the weights, the folder
    #: of the source) -> writes it. Raises `CheckpointError` where it cannot hold them
    write: Callable[[Path, Source, Mapping[str, Mapping[str, Any]], Path], None]
    #: (a file, a folder) -> writes the other files of a folder, such as a tokenizer, and returns one sentence
    #: for each that it could not write
    unpack: Callable[[Path, Path], tuple[str, ...]]

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Interchange:
    """A format of checkpoints that another project defines."""

    #: as `ao convert --to` takes it
    name: str
    #: (a source) -> what makes it one of these, by its tensors rather than by its label; empty: it is none
    detect: Callable[[Source], str]
    #: (such a source) -> its weights. Raises `CheckpointError` where it contradicts itself
    read: Callable[[Source], Reading]
    #: (name of a parameter, its tensor, settings) -> what is stored. Without settings they follow from the
    #: tensor; values that the format cannot hold are put on its nearest grid. Raises `QuantizationError`
    #: where it has none
    write: Callable[[str, QTensor, Mapping[str, Any]], Written]
    #: (settings of all written weights, names of the modules of matrices that stay dense) -> the
    #: `quantization_config` of config.json
    config: Callable[[Mapping[str, Mapping[str, Any]], tuple[str, ...]], dict[str, Any]]
    #: one line: whose format it is, and which forms of it are read and written
    doc: str
    #: settings of the weights in a file -> texts for its header
    metadata: Callable[[Mapping[str, Mapping[str, Any]]], dict[str, str]] = _plain
    #: what its files are; None: safetensors files
    container: Container | None = None

    def __post_init__(self) -> None:
        check_fields(self)
