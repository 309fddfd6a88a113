"""What the libraries that read a folder need there besides weights: their records say it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ao_core.checkpoints.files import copied_files
from ao_core.checkpoints.state import write_whole
from ao_core.config import Config, config_to_dict
from ao_core.errors import CheckpointError
from ao_core.folder_records import FolderKind, FolderModel
from ao_core.registry import registry
from ao_core.tensor.saving.commit import sync_dir

__all__ = ["check_folder", "hints", "model_of", "write_others"]


def check_folder(src: Path) -> None:
    """Raise `CheckpointError` where the weights of a folder cannot be quantized, for what is beside them."""
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


def write_others(src: Path, target: Path, config: Config) -> None:
    """Change copies of files of the source, where those that read them must know what was done."""
    copies = {file.name for file in copied_files(src)}
    for kind in _kinds_of(target):
        for name, text in kind.files(target, config_to_dict(config)).items():
            if name in copies:
                write_whole(target / name, text.encode())
    sync_dir(target)


def hints(target: Path) -> list[str]:
    """How what was written is loaded."""
    return [kind.hint(target) for kind in _kinds_of(target)]


def _kinds_of(folder: Path) -> list[FolderKind]:
    if not folder.is_dir():
        return []
    kinds = [registry.folder_kinds.get(name) for name in sorted(registry.folder_kinds.names())]
    return [kind for kind in kinds if kind.recognizes(folder)]
