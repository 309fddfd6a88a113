"""The linear layer whose weight a fake-quantize rule rounds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core.autograd import signed
from ao_core.compute.emulated import cast_values
from ao_core.compute.fake_quantize import rule_of
from ao_core.compute.linear import cast_matmul
from ao_core.compute.matmuls import Matmuls
from ao_core.compute.reading import is_delayed, rounded, without_transforms
from ao_core.compute.rescaled import rescaled_with_gradient
from ao_core.compute.weight import ComputeWeight
from ao_core.errors import UnsupportedOp
from ao_core.spec import Spec
from ao_core.tensor.autocast import autocasted
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.rounded import rounded_activations

__all__ = ["FakeQuantizedLinear", "fake_linear"]


class FakeQuantizedLinear(nn.Linear):
    """An `nn.Linear` whose class was changed in place: it hands its extra tensors to the rule of its weight.

    Where the weight names no rule, e.g. after it was put back to high precision, it is an `nn.Linear`.
    """

    #: names of the extra tensors; the parameters are called "weight_" and the name
    extra_names: tuple[str, ...]

    def forward(self, input: Tensor) -> Tensor:
        """Shape (…, in_features) to (…, out_features)."""
        extras = [getattr(self, f"weight_{name}") for name in self.extra_names]
        out: Tensor = fake_linear(input, self.weight, self.bias, self.extra_names, *extras)
        return out


# this is run while tracing, not traced: rules choose kernels
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def fake_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    names: tuple[str, ...] = (),
    *extras: Tensor,
) -> Any:
    """`F.linear` with the weight as its rule rounds it; the rule reads extra tensors by name.

    A weight that is quantized already has the one extra tensor "scale", which takes the place of its scales.
    """
    inner = without_transforms(weight)
    if isinstance(inner, QTensor) and names == ("scale",):
        input, bias = autocasted(input, bias)
        values = rescaled_with_gradient(inner, *extras)
        return _Matmul.apply(input, values, bias, Matmuls())  # type: ignore[no-untyped-call]
    spec = inner.matmuls.output if isinstance(inner, ComputeWeight) else None
    rule = rule_of(spec)
    if rule is None or spec is None:
        return F.linear(input, weight, bias)
    if isinstance(inner, ComputeWeight) and isinstance(inner.memory, QTensor):
        raise UnsupportedOp(
            f"the fake-quantize rule {rule.name!r} of a weight that FSDP2 gathered as codes: its values are "
            "rounded already; leave enable_fsdp_float8_all_gather out"
        )
    values = rounded(weight, dict(zip(names, extras, strict=True)))
    if isinstance(values, QTensor):
        input, bias = autocasted(input, bias)
        backward = Matmuls()
        if isinstance(inner, ComputeWeight) and not is_delayed(inner):
            backward = inner.matmuls
        return _Matmul.apply(input, values, bias, backward)  # type: ignore[no-untyped-call]
    input, values, bias = autocasted(input, values, bias)
    if spec.act is not None and not is_delayed(inner):
        input = _CastActivations.apply(input, spec.act)  # type: ignore[no-untyped-call]
    return F.linear(input, values, bias)


@signed
class _Matmul(torch.autograd.Function):
    """The matmul of a stored weight, whose own values get a gradient.

    Kept for the backward pass are the input as it came, and the codes. Both gradients are the matmuls with
    the rounded values of the other operand, in high precision or cast as `matmuls` says.
    """

    @staticmethod
    def forward(input: Tensor, weight: QTensor, bias: Tensor | None, matmuls: Matmuls) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _, ctx.matmuls = inputs
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad_MN = grad.reshape(-1, grad.shape[-1])
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        if of_input:
            spec = ctx.matmuls.grad_input
            if spec is None:
                grad_MK = grad_MN @ _dense(weight, grad.dtype)
            else:  # rounded once, from the logical dtype
                grad_MK = _cast(grad_MN, _dense(weight, weight.dtype).t(), spec)
            grad_input = grad_MK.reshape(input.shape)
        if of_weight:
            spec = ctx.matmuls.grad_weight
            rows = rounded_activations(input, weight).reshape(-1, input.shape[-1])
            grad_weight = grad_MN.t() @ rows if spec is None else _cast(grad_MN.t(), rows.t(), spec)
        if of_bias:
            grad_bias = grad_MN.sum(0)
        return grad_input, grad_weight, grad_bias, None


def _dense(rounded: Tensor, dtype: torch.dtype) -> Tensor:
    """The values; transforms of torch have wrapped a `QTensor`, whose sum with 0 is dense."""
    return rounded.dequantize(dtype) if isinstance(rounded, QTensor) else (rounded + 0).to(dtype)


def _cast(a: Tensor, b: Tensor, spec: Spec) -> Tensor:
    """``a @ b.T`` with both cast as `spec` says."""
    return cast_matmul("mm", spec, a.contiguous(), b.contiguous())


@signed
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
