"""Outputs of a block's layers that stay as they are while the rest of the block is rewritten.

A block runs once for each of its groups, from its start. Once a weight is rewritten, and so all before it,
what its layer returns for a batch is the same in each of the following runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ao_core.calibration.store import Kept, Store
from ao_core.targets import Decision

__all__ = ["Computed"]

#: elements of an input that tell whether it is the one of before
_SAMPLED = 61


@dataclass
class Computed:
    """What the linear layers of a block returned whose weights are rewritten."""

    store: Store
    #: whether every batch reaches a weight, by its name, once at most
    is_used_once: Callable[[str], bool]
    _settled: dict[str, Decision] = field(default_factory=dict)
    #: (weight, batch) -> elements of the input, and the output
    _outputs: dict[tuple[str, int], tuple[Tensor, Kept]] = field(default_factory=dict)

    def settle(self, entries: Sequence[Decision]) -> None:
        """These weights, and all that a batch reaches before them, are not rewritten any more."""
        self._settled |= {e.fqn: e for e in entries if self.is_used_once(e.fqn)}

    @contextmanager
    def reused(self, batch: int, last: bool = False) -> Iterator[None]:
        """Within this context these layers return what they returned for the batch, if that is known.

        `last`: the batch is not run again, so that what is not known yet is not kept, and the rest dropped.
        """
        names = {
            id(getattr(owner.module, owner.name)): name
            for name, entry in self._settled.items()
            for owner in entry.owners
        }
        with _Reuse(self, names, batch, last):
            yield
        if last:
            for place in [place for place in self._outputs if place[1] == batch]:
                self.store.drop(self._outputs.pop(place)[1])

    def of(self, name: str, batch: int, x: Tensor) -> Tensor | None:
        """What the layer of a weight returned; None where that is not known for this input."""
        sample, output = self._outputs.get((name, batch), (None, None))
        if sample is None or output is None or not torch.equal(sample, _sampled(x)):
            return None
        # a copy, in case the block changes it in place
        return self.store.get(output).clone()

    def keep(self, name: str, batch: int, x: Tensor, output: Tensor) -> None:
        """Take note of what a layer returned, while there is memory for it."""
        if (name, batch) not in self._outputs and self.store.has_room(output):
            self._outputs[name, batch] = _sampled(x), self.store.put(output.detach().clone())


class _Reuse(TorchFunctionMode):
    """Puts outputs that are known in the place of calls of `F.linear`."""

    def __init__(self, computed: Computed, names: dict[int, str], batch: int, last: bool) -> None:
        super().__init__()
        self._computed, self._names, self._batch, self._last = computed, names, batch, last

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or len(args) < 2 or id(args[1]) not in self._names:
            return func(*args, **kwargs)
        name, x = self._names[id(args[1])], args[0]
        known = self._computed.of(name, self._batch, x)
        if known is not None:
            return known
        output = func(*args, **kwargs)
        if not self._last:
            self._computed.keep(name, self._batch, x, output)
        return output


def _sampled(x: Tensor) -> Tensor:
    """A few elements from all over a tensor."""
    flat = x.detach().reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLED, 1)].clone()
