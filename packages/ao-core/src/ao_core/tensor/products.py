"""Products and lookups with a `QTensor`: the eager fast path, and the rules below autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.dispatch import select
from ao_core.errors import UnsupportedOp
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.tensor.create import is_cast
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.tables import function, rule

__all__ = ["call_of", "dense_values"]

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: kinds of call whose kernel a tensor remembers before it starts over
_MAX_BOUND = 256


def call_of(op: str, x: Tensor, w: QTensor) -> Call:
    """What kernels may see of a call with activations `x` and weight `w`."""
    return Call(op, w.spec, w.stored_shape, tuple(x.shape), x.dtype, w.device.type)


def _select_linear(x: Tensor, w: QTensor) -> Any:
    """The linear kernel for one kind of call."""
    if w.dim() != 2 or x.dim() == 0 or x.shape[-1] != w.shape[1]:
        raise UnsupportedOp(
            f"linear: input of shape {tuple(x.shape)} does not fit a weight of {tuple(w.shape)}"
        )
    return select(call_of("linear", x, w)).fn


def _bind(x: Tensor, w: QTensor, key: Any) -> Any:
    """Select the linear kernel of one kind of call and remember it on the tensor."""
    if w._epoch != registry.epoch or len(w._bound) >= _MAX_BOUND:
        w._bound.clear()
    w._bound[key] = kernel = _select_linear(x, w)
    w._epoch = registry.epoch  # selecting may have loaded plugins, which starts an epoch
    return kernel


@function(F.linear)
def _linear_fast(input: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
    """Straight to the bound kernel, unless autograd or another subclass has a say."""
    if (
        torch._C._is_any_autocast_enabled()
        and torch.is_autocast_enabled(input.device.type)
        and input.dtype != torch.float64  # which autocast leaves alone
    ):
        return _linear_autocast(input, weight, bias)
    if (
        type(weight) is not QTensor
        or type(input) is not Tensor
        or weight.is_permuted
        or (
            torch.is_grad_enabled()
            and (
                input.requires_grad
                or weight.requires_grad
                or (bias is not None and bias.requires_grad)
            )
        )
    ):
        return NotImplemented
    key = (input.shape, input.dtype)
    kernel = weight._bound.get(key) if weight._epoch == registry.epoch else None
    if kernel is None:
        kernel = _bind(input, weight, key)
    return kernel(input, weight, bias)


def _linear_autocast(x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
    """Cast activations and bias only: kernels follow their dtype, and the weight needs no copy."""
    dtype = torch.get_autocast_dtype(x.device.type)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), w, None if bias is None else bias.to(dtype))


def _is_input(x: Tensor, w: QTensor) -> bool:
    """Whether kernels take x beside the weight: dense, or in the very codes that the weight wants."""
    if not isinstance(x, QTensor):
        return True
    spec, matrices = w.spec, x.dim() == w.dim() == 2
    return matrices and spec.layout == "plain" and spec.act is not None and is_cast(x, spec.act)


def _linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Any:
    if isinstance(x, QTensor):
        call = Call("mm", w.spec, w.stored_shape, tuple(x.shape), x.dtype, x.device.type)
        out = select(call).fn(x, w, w.spec)
        return out if bias is None else out + bias
    # not remembered: a shape that is traced may hold symbols, which do not hash
    return _select_linear(x, w)(x, w, bias)


@rule(aten.linear.default)
def _aten_linear(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, w = args[:2]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    if not isinstance(w, QTensor) or w.is_permuted or not _is_input(x, w):
        return dense_values(func, args, kwargs)
    return _linear(x, w, bias)


def _is_transposed_weight(w: Any) -> bool:
    return isinstance(w, QTensor) and w.order == (1, 0) and w.flat_from is None


@rule(aten.mm.default, aten.matmul.default)
def _mm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, w = args
    if _is_transposed_weight(w) and _is_input(x, w.t()):
        return _linear(x, w.t(), None)
    if x.dim() == w.dim() == 3 and x.shape[0] == w.shape[0]:
        return torch.bmm(x, w)  # the weights of experts
    return dense_values(func, args, kwargs)


@rule(aten.addmm.default)
def _addmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    bias, x, w = args
    if _is_transposed_weight(w) and _is_input(x, w.t()) and not kwargs and bias.dim() == 1:
        return _linear(x, w.t(), bias)
    return dense_values(func, args, kwargs)


@rule(aten.embedding.default)
def _embedding(func: Any, args: Args, kwargs: Kwargs) -> Any:
    w, ids = args[:2]
    if not isinstance(w, QTensor) or w.is_permuted:
        return dense_values(func, args, kwargs)
    return select(call_of("embedding", ids, w)).fn(ids, w)


@rule(
    aten.addbmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.dot.default,
    aten.einsum.default,
    aten.mv.default,
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
)
def dense_values(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Ops whose result is dense anyway: compute them on the values."""
    leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
    dense = [leaf.dequantize() if isinstance(leaf, QTensor) else leaf for leaf in leaves]
    args, kwargs = torch.utils._pytree.tree_unflatten(dense, tree)
    return func(*args, **kwargs)
