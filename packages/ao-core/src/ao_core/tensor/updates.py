"""How operations in place write a `QTensor`: rounded to nearest, or at random where its spec says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ao_core.arguments import checked
from ao_core.errors import UnsupportedOp
from ao_core.layouts import Parts
from ao_core.numerics import block_absmax, split_blocks, stochastic_round
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.encoding import encode_parts

__all__ = [
    "STOCHASTIC",
    "current_generator",
    "is_stochastic",
    "stochastic_rounding",
    "update_parts",
]

#: option of a `Spec` whose codes operations in place round at random
STOCHASTIC = ("rounding", "stochastic")

#: that of this thread, or task: others have their own
_generator: ContextVar[torch.Generator | None] = ContextVar("_generator", default=None)


@checked
@contextmanager
def stochastic_rounding(generator: torch.Generator) -> Iterator[None]:
    """Within this context `generator`, on the device of the weights, decides how updates are rounded.

    For weights in a format that rounds stochastically: wrap the optimizer's `step`.
    """
    token = _generator.set(generator)
    try:
        yield
    finally:
        _generator.reset(token)


def current_generator() -> torch.Generator | None:
    """The generator of the `stochastic_rounding` that is entered here, if any."""
    return _generator.get()


def is_stochastic(spec: Spec) -> bool:
    """Whether values written now are rounded at random: the format is, and a generator decides how."""
    return STOCHASTIC in spec.options and current_generator() is not None


def update_parts(x: Tensor, spec: Spec) -> Parts:
    """The parts of `x`, the result of an operation in place on a tensor of this spec.

    Raises:
        UnsupportedOp: the spec rounds stochastically, and there is no generator.
    """
    if STOCHASTIC not in spec.options:
        return encode_parts(x, spec)
    generator = _generator.get()
    if generator is None:
        raise UnsupportedOp(
            "a weight that rounds stochastically was changed in place without a generator; write "
            "`with stochastic_rounding(generator): optimizer.step()`, and so around the "
            "update_parameters of an average of such weights, or keep the average dense with "
            "dequantize_(average.module)"
        )
    layout, dtype = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)

    def quantize(dense: Tensor) -> tuple[Tensor, Tensor, None]:
        # the greatest magnitude is a code, so that it does not move where nothing is added
        magnitude = block_absmax(dense, spec.block)
        scale = torch.where(magnitude == 0, 1.0, magnitude / dtype.max)
        view, by_block = split_blocks(dense, spec.block, scale)
        rounded = stochastic_round((view / by_block).reshape(dense.shape), generator)
        return dtype.encode(rounded), scale, None

    return layout.encode(x.detach().to(torch.float32).contiguous(), spec, dtype, quantize)
