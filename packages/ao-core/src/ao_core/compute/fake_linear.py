"""The layer that hands the extra tensors of its weight to the fake-quantize rule of the weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core.compute.emulated import cast_values
from ao_core.compute.fake_quantize import rule_of, without_rule
from ao_core.compute.weight import ComputeWeight
from ao_core.errors import UnsupportedOp
from ao_core.spec import Spec
from ao_core.tensor.autocast import autocasted
from ao_core.tensor.qtensor import QTensor

__all__ = ["FakeQuantizedLinear"]


class FakeQuantizedLinear(nn.Linear):
    """An `nn.Linear` whose class was changed in place: it hands its extra tensors to the rule of its weight.

    Where the weight names no rule, e.g. after it was put back to high precision, it is an `nn.Linear`.
    """

    #: names of the extra tensors; the parameters are called "weight_" and the name
    extra_names: tuple[str, ...]

    def forward(self, input: Tensor) -> Tensor:
        """Shape (…, in_features) to (…, out_features)."""
        extras = [getattr(self, f"weight_{name}") for name in self.extra_names]
        out: Tensor = _linear(input, self.weight, self.bias, self.extra_names, *extras)
        return out


# this is run while tracing, not traced: rules choose kernels
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, names: tuple[str, ...], *extras: Tensor
) -> Any:
    inner = _without_transforms(weight)
    spec = inner.matmuls.output if isinstance(inner, ComputeWeight) else None
    rule = rule_of(spec)
    if rule is None or spec is None:
        return F.linear(input, weight, bias)
    if isinstance(inner, ComputeWeight) and isinstance(inner.memory, QTensor):
        raise UnsupportedOp(
            f"the fake-quantize rule {rule.name!r} of a weight that FSDP2 gathered as codes: its values are "
            "rounded already; leave enable_fsdp_float8_all_gather out"
        )
    # a product with 1 is an ordinary tensor that autograd knows to come from the weight
    values = rule.apply(weight * 1, without_rule(spec), dict(zip(names, extras, strict=True)))
    input, values, bias = autocasted(input, values, bias)
    if spec.act is not None:
        input = _CastActivations.apply(input, spec.act)  # type: ignore[no-untyped-call]
    return F.linear(input, values, bias)


def _without_transforms(weight: Tensor) -> Tensor:
    """What the transforms of `torch.func` have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(weight):
        weight = torch._C._functorch.get_unwrapped(weight)
    return weight


class _CastActivations(torch.autograd.Function):
    """Activations (…, K) as a format rounds them; the gradient is that of the identity."""

    @staticmethod
    def forward(x: Tensor, spec: Spec) -> Tensor:
        # blocks are those of the matrix (tokens, K)
        return cast_values(x.reshape(-1, x.shape[-1]), spec).reshape(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
