"""Records for folders of models: what a library keeps next to the weights, and which model they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ao_core.arguments import check_fields

if TYPE_CHECKING:
    from ao_core.report import Report

__all__ = ["FolderKind", "FolderModel", "Place", "Tokenizer"]

#: an index of a parameter at which a tensor of the files lies in it: numbers of matrices, then a slice of
#: rows, such as (3, slice(0, 64)) for half of an expert
Place = tuple[int | slice, ...]


def _one_by_one(parameter: str, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Place]:
    return {}


@dataclass(frozen=True)
class FolderModel:
    """The model that the tensors of a folder belong to, without any weight."""

    #: on the meta device, with tied parameters tied; only its modules and the shapes are looked at
    model: nn.Module
    #: name of a tensor in the files -> name of the parameter that it becomes, alone or joined with others
    names: dict[str, str]
    #: name of a tensor in the files -> why it must stay as it is
    kept: dict[str, str] = field(default_factory=dict)
    #: what and whose it is, such as "LlamaForCausalLM of transformers 5.23.0"
    title: str = ""
    #: gives buffers that are in no file their values, so that the model runs once its tensors are loaded;
    #: None: it cannot be run
    fill_buffers: Callable[[], None] | None = None
    #: (name of a parameter, shapes of the tensors in the files that it is joined of) -> where each lies in
    #: it; empty: it is not known
    places: Callable[[str, Mapping[str, tuple[int, ...]]], Mapping[str, Place]] = _one_by_one

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Tokenizer:
    """How texts become inputs of a model."""

    #: (a text, or the messages of a conversation, mappings with "role" and "content") -> tokens; raises
    #: `ConfigError` where it cannot be done
    encode: Callable[[Any], list[int]]
    #: (tokens (1, T), int64) -> an input of the model, without a cache
    sample: Callable[[Tensor], Any]

    def __post_init__(self) -> None:
        check_fields(self)


def _no_texts(folder: Path) -> Tokenizer | str:
    return "nothing says how texts become inputs of its model"


def _unknown(folder: Path, names: Sequence[str]) -> FolderModel | str:
    return "nothing says which model it belongs to"


@dataclass(frozen=True)
class FolderKind:
    """What a library keeps next to the weights of a model, and what changes there when they are quantized.

    `quantize_checkpoint` copies a folder from one place to another and knows nothing but tensors; a library
    that reads such folders says here what else must be written. Sources are never changed.
    """

    #: what errors and `ao plugins` call it
    name: str
    #: (a folder with weights) -> whether it is one of these
    recognizes: Callable[[Path], bool]
    #: (such a folder) -> None, or why its weights cannot be quantized
    refuses: Callable[[Path], str | None]
    #: (the source, its copy with the quantized weights, what was done) -> texts of files of the copy, by
    #: name: new ones, and those that replace what was copied
    files: Callable[[Path, Path, Report], dict[str, str]]
    #: (the folder that was written) -> how it is loaded, for the user
    hint: Callable[[Path], str]
    #: (such a folder, names of the tensors in its files) -> their model; or why it is not known, and modules
    #: are guessed from names. Code that lies in the folder must not run
    model: Callable[[Path, Sequence[str]], FolderModel | str] = _unknown
    #: (a name for which there is no file) -> the folder that it stands for, brought here for a command; None:
    #: it is no name of this library. Raises `CheckpointError` where it cannot be brought
    fetch: Callable[[str], Path | None] = lambda name: None
    #: (such a folder) -> how texts become inputs of its model; or why that is not known
    tokenizer: Callable[[Path], Tokenizer | str] = _no_texts
    #: (such a folder) -> texts of files of a copy, by name, in which parameters that were tied have weights
    #: of their own
    untied: Callable[[Path], dict[str, str]] = lambda folder: {}

    def __post_init__(self) -> None:
        check_fields(self)
