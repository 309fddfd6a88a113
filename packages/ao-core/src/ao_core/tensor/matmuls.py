"""Matmuls and lookups with a `QTensor`: the eager fast path, and the rules below autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.dispatch import PIN, name_kernel, run, select
from ao_core.errors import UnsupportedOp
from ao_core.records import Call, Kernel
from ao_core.registry import registry
from ao_core.tensor.encoding import already_quantized_as
from ao_core.tensor.frozen import NOBODY, OTHERS, ROWS, differentiable_linear, needs_gradient
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.tables import dense_values, function, on_values, rule
from ao_core.tensor.transforms import is_transforming, transformed_linear

__all__ = [
    "call_of",
    "check_floating",
    "dense_values",
    "exported",
    "is_transposed_weight",
    "matmul_values",
    "select_linear",
]

aten = torch.ops.aten
# every eager matmul asks
_is_any_autocast_enabled, _is_grad_enabled = (
    torch._C._is_any_autocast_enabled,
    torch.is_grad_enabled,
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: dtypes of activations that matmuls are computed in
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: kinds of call whose kernel a tensor remembers before it starts over
_MAX_BOUND = 256


def call_of(op: str, x: Tensor, w: QTensor) -> Call:
    """What kernels may see of a call with activations `x` and weight `w`."""
    return Call(op, w.spec, w.stored_shape, tuple(x.shape), x.dtype, w.device.type)


def check_floating(op: str, x: Tensor) -> None:
    """Refuse activations that torch would not multiply with a floating-point weight either."""
    if x.dtype not in _DTYPES:
        raise UnsupportedOp(
            f"{op}: input of {x.dtype} with a quantized weight; activations must be floating-point "
            f"({', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}): convert them with .to()"
        )


def select_linear(x: Tensor, w: QTensor) -> Kernel:
    """The kernel of `x @ w.T`, for activations x (..., K) and a weight (N, K).

    Raises:
        UnsupportedOp: x is not floating-point, or does not fit the weight; or no kernel serves the call.
    """
    check_floating("linear", x)
    if w.dim() != 2 or x.dim() == 0 or x.shape[-1] != w.shape[1]:
        raise UnsupportedOp(
            f"linear: input of shape {tuple(x.shape)} does not fit a weight of {tuple(w.shape)}"
        )
    return select(call_of("linear", x, w))


def _bind(x: Tensor, w: QTensor, key: Any) -> Kernel:
    """Select the linear kernel of one kind of call and remember it on the tensor.

    The epoch of the tables and the pin are in the key: what another thread does meanwhile, or a plugin
    that selecting loads, makes another key, and never a kernel for the wrong one.
    """
    if len(w._bound) >= _MAX_BOUND:
        w._bound.clear()
    kernel = w._bound[key] = select_linear(x, w)
    return kernel


@function(F.linear)
def _linear_fast(input: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
    """Straight to the bound kernel, unless autograd or another subclass has a say."""
    if (
        _is_any_autocast_enabled()
        and torch.is_autocast_enabled(input.device.type)
        and input.dtype != torch.float64  # which autocast leaves alone
    ):
        return _linear_autocast(input, weight, bias)
    if type(weight) is not QTensor or type(input) is not Tensor or weight.is_permuted:
        return NotImplemented
    if is_transforming() and not weight.requires_grad:
        return transformed_linear(input, weight, bias, select_linear)
    needed = needs_gradient(input, weight, bias) if _is_grad_enabled() else NOBODY
    if needed == OTHERS:
        return _linear_of_rows(input, weight, bias)
    key = (input.shape, input.dtype, PIN.get(), registry.epoch)
    kernel = weight._bound.get(key)
    if kernel is None:
        kernel = _bind(input, weight, key)
    if needed == ROWS:
        return differentiable_linear(input, weight, bias, kernel)
    try:
        return kernel.fn(input, weight, bias)
    except Exception as error:
        name_kernel(error, kernel)
        raise


def _linear_of_rows(x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
    """A matmul of matrices for autograd, which would expand a weight over the batch of some inputs."""
    if x.dim() < 3 or w.dim() != 2:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        return F.linear(x.flatten(0, -2), w, bias).reshape(*x.shape[:-1], w.shape[0])


def _linear_autocast(x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
    """Cast activations and bias only: kernels follow their dtype, and the weight needs no copy."""
    check_floating("linear", x)  # autocast leaves integers alone, and so dense weights refuse them
    dtype = torch.get_autocast_dtype(x.device.type)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), w, None if bias is None else bias.to(dtype))


def _is_input(x: Tensor, w: QTensor) -> bool:
    """Whether kernels take x beside the weight: dense, or in the very codes that the weight wants."""
    if not isinstance(x, QTensor):
        return True
    spec, matrices = w.spec, x.dim() == w.dim() == 2 and not w.spec.input
    return (
        matrices
        and spec.layout == "plain"
        and spec.act is not None
        and already_quantized_as(x, spec.act)
    )


def _linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Any:
    if isinstance(x, QTensor):
        call = Call("mm", w.spec, w.stored_shape, tuple(x.shape), x.dtype, x.device.type)
        out = run(call, x, w, w.spec)
        return out if bias is None else out + bias
    kernel = select_linear(x, w)
    try:
        return kernel.fn(x, w, bias)
    except Exception as error:
        name_kernel(error, kernel)
        raise


@rule(aten.linear.default)
def _aten_linear(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, w = args[:2]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    if not isinstance(w, QTensor) or w.is_permuted or not _is_input(x, w):
        return matmul_values(func, args, kwargs)
    return _linear(x, w, bias)


def is_transposed_weight(w: Any) -> bool:
    """Whether ``x @ w`` is the matmul of a linear layer."""
    return isinstance(w, QTensor) and w.order == (1, 0) and w.flat_from is None


@rule(aten.mm.default, aten.matmul.default)
def _mm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, w = args
    if is_transposed_weight(w) and _is_input(x, w.t()):
        return _linear(x, w.t(), None)
    if x.dim() == w.dim() == 3 and x.shape[0] == w.shape[0]:
        return torch.bmm(x, w)  # the weights of experts
    return matmul_values(func, args, kwargs)


@rule(aten.addmm.default)
def _addmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    bias, x, w = args
    if is_transposed_weight(w) and _is_input(x, w.t()) and not kwargs and bias.dim() == 1:
        return _linear(x, w.t(), bias)
    return matmul_values(func, args, kwargs)


@rule(aten.embedding.default)
def _embedding(func: Any, args: Args, kwargs: Kwargs) -> Any:
    w, ids = args[:2]
    if not isinstance(w, QTensor) or w.is_permuted:
        return dense_values(func, args, kwargs)
    if ids.dtype not in (torch.int64, torch.int32):
        raise UnsupportedOp(f"embedding: ids of {ids.dtype}; they must be int64 or int32")
    return run(call_of("embedding", ids, w), ids, w)


@rule(
    aten.addbmm.default,
    aten.addmv.default,
    aten.baddbmm.default,
    aten.convolution_backward.default,
    aten.dot.default,
    aten.einsum.default,
    aten.linear_backward.default,
    aten.mv.default,
)
def matmul_values(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Matmuls without a kernel: on the values, in the dtype of the dense operand.

    The logical dtype of a quantized operand does not count, as in kernels: under autocast, mixed
    precision of FSDP2, or with activations of another dtype, gradients meet it as activations do.
    """
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    dense = (x.dtype for x in leaves if isinstance(x, Tensor) and not isinstance(x, QTensor))
    return on_values(func, args, kwargs, next((d for d in dense if d.is_floating_point), None))


rule(
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._embedding_bag_per_sample_weights_backward.default,
    aten._trilinear.default,
    aten.mkldnn_rnn_layer.default,
    aten.mkldnn_rnn_layer_backward.default,
    aten._cudnn_rnn.default,
    aten._cudnn_rnn_backward.default,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.neg.default,
    aten.abs.default,
    aten.pow.Tensor_Scalar,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.amax.default,
    aten.max.default,
    aten.min.default,
    aten.linalg_vector_norm.default,
    aten.isnan.default,
    aten.isfinite.default,
    aten.eq.Tensor,
    aten.allclose.default,
    aten.lt.Scalar,
    aten.ne.Scalar,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.index.Tensor,
    aten._local_scalar_dense.default,
)(dense_values)


def exported(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A torch function of a weight whose parts are traced, as `unwrap_tensor_subclass_parameters` makes it.

    `torch.export` records what is called above autograd, so nothing may wait for the rules below it.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot

    mode = get_proxy_mode()
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    parts = [p for leaf in leaves if isinstance(leaf, QTensor) for _, p in leaf.leaves()]
    # the parts of a weight that is an input of the graph itself may be traced one by one, never all
    if mode is None or not parts or not all(has_proxy_slot(p, mode.tracer) for p in parts):
        return NotImplemented
    if getattr(func, "__name__", "") == "__get__":
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        if func is F.linear:
            return _aten_linear(aten.linear.default, args, kwargs)
        if (found := _with_activations(func, args, kwargs)) is not None:
            return found
        return dense_values(func, args, kwargs)


def _with_activations(func: Any, args: Args, kwargs: Kwargs) -> Tensor | None:
    """A convolution whose activations are quantized; None of anything else.

    Raises:
        UnsupportedOp: the weights of experts, which are multiplied by several functions, one after the other.
    """
    from ao_core.tensor.convolutions import FUNCTIONS, convolved_by, matrix_spec_of

    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    acting = [w for w in leaves if isinstance(w, QTensor) and w.spec.act is not None]
    if func in FUNCTIONS and acting:
        return convolved_by(*args, **kwargs)
    if any(w.dim() == 3 and matrix_spec_of(w.spec) is None for w in acting):
        raise UnsupportedOp(
            f"{getattr(func, '__name__', func)} while exporting: the activations of experts are quantized, "
            "which the graph would leave out; export a model whose experts are weight-only"
        )
    return None
