"""How the inputs of layers are spread: what makes one error of a weight matter more than another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ao_core.ext import QuantizationError
from ao_core.ext.calibration import HESSIAN, Data, Statistics, batches_of, call, evaluating

__all__ = ["Layers", "input_moments", "portions"]

#: layers by name
Layers = Sequence[tuple[str, nn.Module]]
#: bytes of moments that are held at a time
LIMIT = 2**31


class _Seen:
    """Sums of x xᵀ by layer. Layers that are called with the same tensor, in order, share theirs."""

    def __init__(self) -> None:
        self.by_name: dict[str, Statistics] = {}
        #: the last input and its version, the statistics before it, and with it
        self._last: tuple[Tensor, int, Statistics | None, Statistics] | None = None

    def note(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        x, before = args[0], self.by_name.get(name)
        last = self._last
        if last is None or last[0] is not x or last[1] != x._version or last[2] is not before:
            if not bool(x.isfinite().all()):
                raise QuantizationError(
                    f"data: the inputs of {name} have NaN or inf; find out where the model makes them"
                )
            start = Statistics((HESSIAN,)) if before is None else before
            self._last = last = x, x._version, before, start.add(x)
        self.by_name[name] = last[3]


def input_moments(model: nn.Module, layers: Layers, data: Data) -> dict[str, Tensor]:
    """The mean of x xᵀ over all rows x of a layer's inputs, (K, K), float64; by name.

    Args:
        model: is run in evaluation mode and not changed.
        layers: called with their input as first argument. Those that the data does not reach are left out.
        data: batches, as for `quantize_`.

    Raises:
        ConfigError: no data, or the model cannot be called with a batch.
        QuantizationError: inputs have NaN or inf.
    """
    batches = batches_of(data, "weighing errors by the inputs")
    seen = _Seen()
    hooks = [layer.register_forward_pre_hook(partial(seen.note, name)) for name, layer in layers]
    try:
        with evaluating(model):
            for batch in batches:
                call(model, batch, "data")
    finally:
        for hook in hooks:
            hook.remove()
    return {name: found["hessian"] / found.rows for name, found in seen.by_name.items()}


def portions(layers: Layers, limit: int | None = None) -> Iterator[Layers]:
    """Layers in their order, in portions whose moments take no more memory than the limit."""
    limit = LIMIT if limit is None else limit
    portion: list[tuple[str, nn.Module]] = []
    taken = 0
    for name, layer in layers:
        size = 8 * int(layer.in_features) ** 2  # type: ignore[arg-type]
        if portion and taken + size > limit:
            yield portion
            portion, taken = [], 0
        portion.append((name, layer))
        taken += size
    if portion:
        yield portion
