"""What torch computes while the modules of a plugin are imported; run in a process of its own.

Prints a list of the operations as JSON, for `PluginSuite`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ao_core.registry import registry

__all__ = ["main"]


class _Watch(TorchDispatchMode):
    """Notes the largest operation of each entry point."""

    def __init__(self, module: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest: dict[str, Any] = {"module": module, "op": "nothing", "elements": 0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        elements = _elements(tree_leaves((args, kwargs, out)))
        if elements > self.largest["elements"]:
            self.largest |= {"op": str(func), "elements": elements}
        return out


def _elements(leaves: Iterable[object]) -> int:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return sum(each.numel() for each in tensors if each.device.type != "meta")


def main(distribution: str) -> None:
    """Import the plugins of a distribution, and print the largest operation of each."""
    from ao_core.discovery import installed, select

    for table in registry.tables.values():
        table.fill()  # what ao-core computes itself is not the plugin's
    found = []
    for candidate in select(installed()[0], [distribution]):
        with _Watch(candidate.module) as watch:
            candidate.entry_point.load()
        found.append(watch.largest)
    sys.stdout.write(f"\n{json.dumps(found)}\n")
