"""How operations in place write a `QTensor`: rounded to nearest, or at random where its spec says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts import Parts
from ao_core.numerics import block_absmax, split_blocks, stochastic_round
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.create import encode_parts

__all__ = ["STOCHASTIC", "stochastic_rounding", "update_parts"]

#: option of a `Spec` whose codes operations in place round at random
STOCHASTIC = ("rounding", "stochastic")

_generators: list[torch.Generator] = []


@contextmanager
def stochastic_rounding(generator: torch.Generator) -> Iterator[None]:
    """Within this context `generator`, on the device of the weights, decides how updates are rounded.

    For weights in a format that rounds stochastically: wrap the optimizer's `step`.
    """
    _generators.append(generator)
    try:
        yield
    finally:
        _generators.pop()


def update_parts(x: Tensor, spec: Spec) -> Parts:
    """The parts of `x`, the result of an operation in place on a tensor of this spec.

    Raises:
        UnsupportedOp: the spec rounds stochastically, and there is no generator.
    """
    if STOCHASTIC not in spec.options:
        return encode_parts(x, spec)
    if not _generators:
        raise UnsupportedOp(
            "a weight that rounds stochastically was changed in place without a generator; write "
            "`with stochastic_rounding(generator): optimizer.step()`"
        )
    layout, dtype = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    x = layout.project(x.detach().to(torch.float32), spec)
    # the greatest magnitude is a code, so that it does not move where nothing is added
    magnitude = block_absmax(x, spec.block)
    scale = torch.where(magnitude == 0, 1.0, magnitude / dtype.max)
    view, by_block = split_blocks(x, spec.block, scale)
    rounded = stochastic_round((view / by_block).reshape(x.shape), _generators[-1])
    return layout.pack(dtype.encode(rounded), scale, None, spec, dtype)
