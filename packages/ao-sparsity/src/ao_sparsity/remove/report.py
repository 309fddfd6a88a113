"""What was removed from a model, and what was not."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ao_core.ext.reports import aligned, size_text
from ao_sparsity.remove.choosing import Kept
from ao_sparsity.remove.groups import Site

__all__ = ["RemovalReport", "Removed"]


@dataclass(frozen=True)
class Removed:
    """Channels of a group that are gone."""

    #: as `ChannelGroup.name`
    name: str
    #: how many channels there were
    size: int
    channels: tuple[int, ...]
    #: parameters and buffers, with the dimension, along which the channels were computed
    writers: tuple[Site, ...]
    #: weights, with the dimension, that read them
    readers: tuple[Site, ...]


@dataclass(frozen=True)
class RemovalReport:
    """What `remove_channels` did; prints as a table."""

    #: the groups of channels that went
    removed: tuple[Removed, ...]
    #: what was asked to go and stays, with reasons
    kept: tuple[Kept, ...]
    #: attributes of modules that were changed, but for those of torch's own layers: old and new value
    attributes: dict[str, tuple[Any, Any]]
    #: attributes that may be a size that changed, left as they are since nothing traced needs them
    left: dict[str, Any]
    #: number of elements of all parameters, before and after
    parameters: tuple[int, int]
    #: their bytes, before and after
    bytes: tuple[int, int]
    #: norm of the difference of the outputs from those of the dense model that does not read what is
    #: gone, over the norm of these
    difference: float

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        rows = [("channels of", "before", "after", "read by")]
        for group in self.removed:
            readers = ", ".join(f"{name}" for name, _ in group.readers)
            left = group.size - len(group.channels)
            rows.append((group.name, str(group.size), str(left), readers))
        blocks = [aligned(rows, right=(1, 2))] if self.removed else []
        if self.kept:
            blocks.append("\n".join(["kept, though asked to go:", *(f"  {k}" for k in self.kept)]))
        if self.attributes:
            changed = {name: f"{old} → {new}" for name, (old, new) in self.attributes.items()}
            blocks.append("\n".join(["attributes:", *_alike(changed)]))
        if self.left:
            head = "attributes that may mean an old size, left since nothing traced needs them:"
            blocks.append("\n".join([head, *_alike(self.left)]))
        before, after = self.bytes
        share = 100 * after / max(before, 1)
        blocks.append(
            f"{self.parameters[0]} → {self.parameters[1]} parameters, {size_text(before)} → "
            f"{size_text(after)} ({share:.1f}%); outputs differ by {self._error} of their norm "
            "from those of the model whose removed channels are zero (not from those of the dense model)"
        )
        return "\n\n".join(blocks)

    @property
    def _error(self) -> str:
        return "less than 1e-05" if self.difference < 1e-5 else f"{self.difference:.1e}"


def _alike(attributes: Mapping[str, Any]) -> list[str]:
    """Lines of text, one for all that differ in the number of a layer only."""
    counts = Counter(
        f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', name)}: {value}"
        for name, value in attributes.items()
    )
    return [f"  {line}" + (f" ({n} times)" if n > 1 else "") for line, n in counts.items()]
