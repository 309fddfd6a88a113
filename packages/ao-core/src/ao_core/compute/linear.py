"""The three matmuls of a linear layer whose weight is a `ComputeWeight`; drawn in docs/design.md."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.autograd import signed
from ao_core.compute.emulated import is_one_node
from ao_core.compute.gather import materialize_transpose
from ao_core.compute.matmuls import rule_name
from ao_core.compute.reading import needs_no_extras, read, stored
from ao_core.compute.weight import FUNCTIONS, MATMULS, ComputeWeight
from ao_core.dispatch import run
from ao_core.errors import UnsupportedOp
from ao_core.records import Call
from ao_core.spec import Spec
from ao_core.tensor.autocast import autocasted
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.wrapper import dense_memory

__all__ = ["cast_matmul", "linear"]

aten = torch.ops.aten


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, all three of whose matmuls are computed as the weight says."""
    if needs_no_extras(weight):
        # its module imports torch's compiler, which who trains no codes should not wait for
        from ao_core.compute.fake_linear import fake_linear

        return fake_linear(input, weight, bias)  # type: ignore[no-any-return]
    input, weight, bias = autocasted(input, weight, bias)
    # Dynamo traces no function that has a forward mode
    function = _Linear if torch.compiler.is_compiling() else _LinearWithJvp
    out: Tensor = function.apply(input, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


@signed
class _Linear(torch.autograd.Function):
    """The three matmuls of a linear layer; each reaches its rule through the weight.

    They are operators rather than functions: `torch.mm` of a `ComputeWeight` is such a layer itself.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor) -> Tensor:
        out = aten.mm.default(input.reshape(-1, input.shape[-1]), weight.t())
        # not a view for autograd: hooks of FSDP2 warn of those
        shape = [*input.shape[:-1], weight.shape[0]]
        return aten._unsafe_view.default(out, shape)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        grad_2d, flat = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        of_input, of_weight = ctx.needs_input_grad
        grad_input = grad_weight = None
        if of_input and of_weight and isinstance(weight, ComputeWeight):
            # both at once, since what they share is then cast once
            mask = [True, True, False]
            grad_input, grad_weight, _ = aten.linear_backward.default(flat, grad_2d, weight, mask)
        else:
            if of_input:
                grad_input = aten.mm.default(grad_2d, weight)
            if of_weight:
                # beta=0: the weight adds nothing, it only says which matmul this is, and brings its spec
                grad_weight = aten.addmm.default(weight, grad_2d.t(), flat, beta=0)
        return grad_input if grad_input is None else grad_input.reshape(input.shape), grad_weight


class _LinearWithJvp(_Linear):
    @staticmethod
    def jvp(ctx: Any, of_input: Tensor | None, of_weight: Tensor | None) -> Tensor | None:
        """Forward mode: of the function that is not rounded, as the backward pass, and in high precision."""
        input, weight = ctx.saved_tensors
        changes = []
        if of_input is not None:
            changes.append(F.linear(of_input, dense_memory(weight)))
        if of_weight is not None:
            changes.append(F.linear(input, dense_memory(of_weight)))
        return sum(changes[1:], changes[0]) if changes else None


def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``x @ w.T`` (output), ``g @ w`` (grad_input) and ``addmm(w, g.T, x, beta=0)`` (grad_weight)."""
    if func is aten.mm.default and isinstance(args[1], ComputeWeight):
        a, w = args
        if rule_name(w.matmuls.output):
            return torch.mm(a, stored(w))
        spec = w.matmuls.output if w.transposed else w.matmuls.grad_input
        return _cast_mm(a, w.memory.t(), spec)
    if func is aten.addmm.default and isinstance(args[2], ComputeWeight) and not kwargs:
        bias, a, w = args  # how a linear layer of `DTensor`s arrives
        if rule_name(w.matmuls.output):
            return torch.addmm(bias, a, stored(w))
        return bias + torch.mm(a, w)  # type: ignore[no-any-return]
    if (
        func is aten.addmm.default
        and isinstance(args[0], ComputeWeight)
        and kwargs.get("beta") == 0
    ):
        w, a, b = args
        return _cast_mm(a, b.t(), w.matmuls.grad_weight)
    return read(func, args, kwargs)  # type: ignore[no-any-return]


def _gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Both matmuls of the backward pass, by `aten.linear_backward(x, grad, w, mask)` for matrices."""
    x, grad, w, _ = args
    _, of_input, of_weight = w.matmuls
    alike = of_input is not None and of_weight is not None and of_input.act == of_weight.act
    grad_MN, grad_NM = _cast_both(grad, of_input.act if alike else None)
    return _cast_mm(grad_MN, w.memory.t(), of_input), _cast_mm(grad_NM, x.t(), of_weight), None


def _cast_both(x: Tensor, spec: Spec | None) -> tuple[Tensor, Tensor]:
    """A matrix and its transpose, both cast as `spec` says, or as they are."""
    if spec is None or is_one_node(x, spec):
        return x, x.t()
    shape = (x.shape[0], x.shape[1])
    call = Call("quantize_both", spec, shape, shape, x.dtype, x.device.type)
    parts, transposed = run(call, x, spec)
    return QTensor(parts, spec, shape, x.dtype), QTensor(transposed, spec, shape[::-1], x.dtype)


def _cast_mm(a_MC: Tensor, b_NC: Tensor, spec: Spec | None) -> Tensor:
    """``a @ b.T`` with both cast as `spec` says."""
    operands = (dense_memory(a_MC), b_NC)
    a, b = (materialize_transpose(x) if isinstance(x, QTensor) else x for x in operands)
    if spec is None:
        return torch.mm(a, b.t())
    return cast_matmul("mm", spec, a, b)


def cast_matmul(op: str, spec: Spec, a: Tensor, b: Tensor, *others: Any) -> Tensor:
    """The matmul of plain `a` and `b`, which may be cast already, by the best kernel of `op`."""
    if rule := rule_name(spec):
        raise UnsupportedOp(
            f"{op} with a weight that the fake-quantize rule {rule!r} rounds: the rule reads further "
            "parameters of the weight's module; call the module"
        )
    for operand in (a, b):
        if not operand.is_floating_point():
            raise UnsupportedOp(
                f"{op}: an operand of {operand.dtype} with a weight of low-precision matmuls; both must be "
                "floating-point: convert it with .to()"
            )
    call = Call(op, spec, tuple(b.shape), tuple(a.shape), a.dtype, a.device.type)
    return run(call, a, b, *others, spec)  # type: ignore[no-any-return]


FUNCTIONS[F.linear] = linear
MATMULS[aten.mm.default] = MATMULS[aten.addmm.default] = _matmul
MATMULS[aten.linear_backward.default] = _gradients
