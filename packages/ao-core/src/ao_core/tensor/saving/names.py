"""What the files of a checkpoint are called: `model.safetensors`, or shards with an index."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MODEL", "FileNames", "names_of_files"]

_SINGLE = ".safetensors"
_INDEX = ".safetensors.index.json"
#: eight hexadecimal digits tell apart two checkpoints that are in one place for a moment
_NUMBER = r"(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors"


@dataclass(frozen=True)
class FileNames:
    """The names of the files of a checkpoint, which begin alike."""

    #: "model"; another library's files may begin with another word
    stem: str

    @property
    def single(self) -> str:
        """Of a checkpoint in one file."""
        return self.stem + _SINGLE

    @property
    def index(self) -> str:
        """What lists the shards."""
        return self.stem + _INDEX

    def shards(self, count: int, token: str = "") -> list[str]:
        """So many shards; a token tells them apart from those of another checkpoint."""
        start = f"{self.stem}-{token}" if token else self.stem
        return [f"{start}-{i + 1:05}-of-{count:05}{_SINGLE}" for i in range(count)]

    def has_tensors(self, name: str) -> bool:
        """Whether a name is that of a file of tensors of such a checkpoint."""
        rest = name.removeprefix(self.stem)
        return name == self.single or (rest != name and re.fullmatch(_NUMBER, rest) is not None)

    def is_all(self, names: Sequence[str]) -> bool:
        """Whether files of tensors are of such a checkpoint, or variants of it (`model.fp16.safetensors`)."""
        return all(self.has_tensors(n) or n.startswith(f"{self.stem}.") for n in names)

    def without_variant(self) -> FileNames:
        """Those of `model`, for those of `model.fp16`."""
        return FileNames(self.stem.partition(".")[0])


#: what ao calls its own
MODEL = FileNames("model")


def names_of_files(folder: Path) -> FileNames | None:
    """The names of the checkpoint in a folder; None: no file there is the index or all of one.

    Names that begin with "model" come first. Others count only if all files of tensors belong to them.
    """
    try:
        names = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
    except OSError:
        return None
    if MODEL.index in names or MODEL.single in names:
        return MODEL
    tensors = [name for name in names if name.endswith(_SINGLE)]
    whole = [name for name in tensors if not re.search(f"{_NUMBER}$", name)]
    indices = [name for name in names if name.endswith(_INDEX)]
    stems = [n.removesuffix(_INDEX) for n in indices] + [n.removesuffix(_SINGLE) for n in whole]
    return next((each for each in map(FileNames, stems) if each.is_all(tensors)), None)
