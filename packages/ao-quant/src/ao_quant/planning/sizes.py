"""How many bytes `save_model` writes, as a sum over tensors that is never too small."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.ext import ConfigError
from ao_core.ext.saving import bytes_of_text, state_dict_to_flat

__all__ = ["Files", "Size", "budget_bytes"]

#: the default of `save_model`; a model above it has several files, of at least half of it together
_SHARD = 5 * 10**9
#: what the index says of a tensor, beside its name
_INDEX_LINE = len('    : "model-00000000-00000-of-00000.safetensors",\n')
#: length of a header, and spaces that align what follows it
_FRAME = 16


def budget_bytes(size: object) -> int:
    """Bytes of "1.2GB", "300 MB", "1GiB" or a number of them.

    Raises:
        ConfigError: it is not a positive size.
    """
    value = bytes_of_text(str(size)) if type(size) in (int, str) else 0
    if value < 1:
        raise ConfigError(
            f'budget={size!r}: give positive bytes, or a size such as "300MB", "1.2GB" or "1GiB"'
        )
    return value


class Size(NamedTuple):
    """What a tensor adds to the files of a model."""

    #: data, names, format and checksums
    total: int
    #: the data alone
    data: int
    #: who provides its format and layout: said once per file
    providers: frozenset[str]


@dataclass(frozen=True)
class Files:
    """The files of a model whose data has at most `most` bytes."""

    most: int

    def size(self, fqn: str, tensor: Tensor) -> Size:
        """Of one dense or quantized tensor."""
        flat, metadata = state_dict_to_flat({fqn: tensor})
        header = json.loads(metadata["ao"])
        total = _escaped(header["tensors"]) + _escaped(header["raw"])
        for name, leaf in flat.items():
            code = (
                "U8" if leaf.dtype == torch.uint8 else "BF16" if leaf.itemsize == 2 else "F8_E4M3"
            )
            place = {"dtype": code, "shape": [*leaf.shape], "data_offsets": [self.most] * 2}
            total += leaf.nbytes + _within(_compact({name: place})) + _escaped({name: "00000000"})
            if self.most > _SHARD:
                total += len(json.dumps(name)) + _INDEX_LINE
        data = sum(leaf.nbytes for leaf in flat.values())
        return Size(total, data, frozenset(map(_compact, header["providers"])))

    def frame(
        self, kept: Mapping[str, Tensor], providers: Iterable[str], ties: Mapping[str, str]
    ) -> tuple[int, dict[str, int]]:
        """What there is beside the planned parameters, and what each provider of a format adds.

        Args:
            kept: other parameters and buffers that are saved.
            providers: of the formats that may be chosen.
            ties: names that stand for planned parameters -> their first names.
        """
        _, metadata = state_dict_to_flat(kept)
        header = json.loads(metadata["ao"])
        total = _escaped(ties) + _escaped(header["ties"])
        total += sum(self.size(n, t).total for n, t in kept.items() if n not in header["ties"])
        bare = _compact({**header, "tensors": {}, "ties": {}, "raw": {}, "crc32": {}})
        file = _FRAME + len(_compact({"__metadata__": {**metadata, "ao": bare}}))
        known = set(map(_compact, header["providers"]))
        # an object as a string, and a comma
        charges = {p: len(json.dumps(p)) - 1 if p not in known else 0 for p in sorted(providers)}
        if self.most <= _SHARD:
            return total + file, charges
        # two files that follow one another have more than _SHARD together; the index names each
        files = 2 * self.most // _SHARD + 2
        charges = {name: files * charge for name, charge in charges.items()}
        return total + files * (file + 2 * _INDEX_LINE), charges


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _within(text: str) -> int:
    """Length of an object's text within a larger object: a comma in place of its braces."""
    return len(text) - 1 if text != "{}" else 0


def _escaped(data: Any) -> int:
    """Length of a part of the text that stands in the metadata as a string."""
    return _within(json.dumps(_compact(data))[1:-1])
