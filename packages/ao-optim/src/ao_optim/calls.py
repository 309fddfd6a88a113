"""What the ops of this package are called with: the formats of moments, and dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext import NO_SCALE

__all__ = ["StepCall", "dense_spec", "moment_spec"]

#: formats of moments that are not quantized
_DENSE = {
    torch.float32: Spec("fp32", (1,), NO_SCALE),
    torch.bfloat16: Spec("bf16", (1,), NO_SCALE),
    torch.float16: Spec("fp16", (1,), NO_SCALE),
}


@dataclass(frozen=True)
class StepCall:
    """What kernels of a step may look at; an `ao_core.OpCall`."""

    #: "adam_step", "lion_step" or "rule_step"
    op: str
    #: the format of each moment, in the op's order; those of dense ones are "fp32", … in the layout "plain"
    specs: tuple[Spec, ...]
    #: elements of all parameters
    numel: int
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    device: str
    #: why only the reference can serve: what hinders a program of the rule
    obstacle: str | None = None

    @property
    def layout(self) -> str:
        """That of the first moment; "plain" where a rule has none."""
        return self.specs[0].layout if self.specs else "plain"


def moment_spec(moment: Tensor) -> Spec:
    """The format of a moment, quantized or dense, as `StepCall` has it."""
    return moment.spec if isinstance(moment, QTensor) else dense_spec(moment.dtype)


def dense_spec(dtype: torch.dtype) -> Spec:
    """The format of dense moments, as `StepCall` has it."""
    return _DENSE[dtype]
