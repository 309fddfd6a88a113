"""Tokens that several blocks got at once, of which the model learns block by block."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ao_hf.cache.layers import AoLayer

__all__ = ["Ahead"]


class Ahead:
    """What blocks return that the model did not call yet, while their layers hold the tokens already.

    Args:
        run: whose blocks they are.
        first: number of the first block in it, which was called.
        made: what the blocks return, one after the other.
        kwargs: named arguments of the first block.
        layers: of the cache, one for each block.
        tokens: how many each layer got.
    """

    def __init__(
        self,
        run: object,
        first: int,
        made: Tensor,
        kwargs: dict[str, Any],
        layers: Sequence[AoLayer],
        tokens: int,
    ) -> None:
        self.run, self.first, self.outputs = run, first, made.unbind(0)
        #: which says that nobody wrote to what blocks return; in inference mode nobody counts
        self._version = None if made.is_inference() else made._version
        self.kwargs, self.layers, self.tokens = kwargs, layers, tokens
        #: how many blocks were called
        self.called = 1

    def next(self, run: object, place: int, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """What block number `place` returns, if it is the next one and is called as the first one was."""
        turn = place - self.first
        if run is not self.run or turn != self.called or x is not self.outputs[turn - 1]:
            return None
        if self._version is not None and x._version != self._version:
            return None
        own = self.kwargs
        if own.keys() != kwargs.keys() or not all(map(is_, map(own.get, kwargs), kwargs.values())):
            return None
        self.called += 1
        return self.outputs[turn]

    def undo(self) -> None:
        """Let the layers of blocks that were not called forget the tokens."""
        for layer in self.layers[self.called :]:
            layer.crop(-self.tokens)
