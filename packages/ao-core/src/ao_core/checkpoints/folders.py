"""What the libraries that read a folder need there besides weights: their records say it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ao_core.checkpoints.state import write_whole
from ao_core.errors import CheckpointError, ConfigError
from ao_core.folder_records import FolderKind, FolderModel, Tokenizer
from ao_core.registry import registry
from ao_core.report import Report
from ao_core.tensor.saving.commit import sync_dir

__all__ = [
    "check_folder",
    "find",
    "hints",
    "model_of",
    "tokenizer_of",
    "write_others",
    "write_untied",
]


def find(name: Path) -> Path:
    """What a user named: what is there under that name, or else what a library brings here for it."""
    if os.path.lexists(name):
        return name
    found = (kind.fetch(name.as_posix()) for kind in _kinds())
    return next((folder for folder in found if folder is not None), name)


def check_folder(src: Path) -> None:
    """Raise `CheckpointError` where other files of a folder say that its weights cannot be quantized."""
    for kind in _kinds_of(src):
        if reason := kind.refuses(src):
            raise CheckpointError(f"{src}: {reason}")


def model_of(src: Path, names: Sequence[str]) -> FolderModel | str:
    """The model that tensors of these names are of; or why no library knows it."""
    reasons = []
    for kind in _kinds_of(src):
        found = kind.model(src, names)
        if isinstance(found, FolderModel):
            return found
        reasons.append(found)
    return "; ".join(reasons) or "no library knows the folder"


def tokenizer_of(src: Path) -> Tokenizer:
    """How texts become inputs of the model of a folder.

    Raises:
        ConfigError: no library knows; it says why not.
    """
    reasons = []
    for kind in _kinds_of(src):
        found = kind.tokenizer(src)
        if isinstance(found, Tokenizer):
            return found
        reasons.append(found)
    raise ConfigError(
        f"data: {src}: {'; '.join(reasons) or 'no library knows the folder'}; call quantize_checkpoint "
        "with a list of inputs of the model"
    )


def write_others(src: Path, target: Path, report: Report) -> list[str]:
    """Write what those that read the folder must know of what was done; returns the names of the files."""
    written: dict[str, str] = {}
    for kind in _kinds_of(src):
        if kind.recognizes(target):
            written |= kind.files(src, target, report)
    for name, text in written.items():
        write_whole(target / name, text.encode())
    sync_dir(target)
    return list(written)


def write_untied(src: Path, target: Path) -> None:
    """Write what those that read the folder must know of tied parameters that are not tied any more."""
    for kind in _kinds_of(src):
        for name, text in kind.untied(src).items():
            write_whole(target / name, text.encode())


def hints(target: Path) -> list[str]:
    """How what was written is loaded."""
    return [kind.hint(target) for kind in _kinds_of(target)]


def _kinds_of(folder: Path) -> list[FolderKind]:
    return [kind for kind in _kinds() if kind.recognizes(folder)] if folder.is_dir() else []


def _kinds() -> Iterator[FolderKind]:
    return map(registry.folder_kinds.get, sorted(registry.folder_kinds.names()))
