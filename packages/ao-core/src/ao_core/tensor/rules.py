"""Rules of `__torch_dispatch__` that hold for every layout: views, copies, moves, arithmetic in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from ao_core.errors import UnsupportedOp
from ao_core.layouts import Parts
from ao_core.spec import Spec
from ao_core.tensor import cut
from ao_core.tensor.activations import act_names
from ao_core.tensor.create import encode_parts
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import native
from ao_core.tensor.tables import rule
from ao_core.tensor.updates import STOCHASTIC, update_parts

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _aliased(func: Any, args: Args, kwargs: Kwargs, out: Any) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, out)


@rule(aten.detach.default, aten.alias.default)
def _alias(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _aliased(func, args, kwargs, args[0].map_leaves(func))


@rule(aten.clone.default, aten.contiguous.default)
def _clone(func: Any, args: Args, kwargs: Kwargs) -> Any:
    # parts keep their own memory format: the outward strides are only a view of them
    return _aliased(func, args, kwargs, cut.owned(args[0].map_leaves(torch.clone)))


@rule(aten._to_copy.default)
def _to_copy(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor: QTensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    if not dtype.is_floating_point:
        return func(tensor.dequantize(), **kwargs)
    device = torch.device(kwargs.get("device") or tensor.device)
    move = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking", "pin_memory")}
    if device.type == tensor.device.type and (
        dtype == tensor.dtype or tensor.layout_record.canonical
    ):
        return cut.owned(tensor.map_leaves(lambda part: func(part, **move), dtype=dtype))
    moved = tensor.canonical().map_leaves(lambda part: func(part, **move), dtype=dtype)
    return cut.owned(moved if device.type == "meta" else native(moved))


@rule(aten.to.dtype)
def _to_dtype(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """How a change of dtype arrives below autograd, where it is not taken apart."""
    tensor, dtype = args[:2]
    return tensor if tensor.dtype == dtype else aten._to_copy.default(tensor, dtype=dtype)


@rule(aten.copy_.default)
def _copy_(func: Any, args: Args, kwargs: Kwargs) -> Any:
    target, source = args[:2]
    if not isinstance(target, QTensor):
        return func(target, source.dequantize(), *args[2:], **kwargs)
    if isinstance(source, QTensor) and cut.same_kind(target, source):
        _check_writable(target, source)
        _check_sizes(target, source.parts)
        for name in target.part_names:
            getattr(target, name).copy_(getattr(source, name), *args[2:])
    else:
        dense = source.dequantize() if isinstance(source, QTensor) else source
        _store(target, dense.to(target.device).expand(target.shape), encode_parts)
    return _aliased(func, args, kwargs, target)


def _check_writable(target: QTensor, source: QTensor | None) -> None:
    """Refuse to write where other elements share a part, unless it keeps, or first gets, its value.

    Dense values, in place of a `source`, leave the scales of activations alone.
    """
    for name in target._borrowed - set(act_names(target.spec) if source is None else ()):
        old = getattr(target, name)
        if (
            source is None
            or name == "qdata"
            or not (_blank(old) or _equal_parts(old, source, name))
        ):
            raise UnsupportedOp(
                f"copy_ or an operation in place on a slice of layout {target.spec.layout!r}: its "
                f"{name!r} is shared with, or copied from, a larger tensor; change that one as a whole"
            )


def _check_sizes(target: QTensor, parts: Parts) -> None:
    """Refuse parts of other sizes than there is memory for, where the values decide on sizes."""
    for name, part in parts.items():
        old = getattr(target, name)
        if old.shape != part.shape:
            raise UnsupportedOp(
                f"copy_ or an operation in place on layout {target.spec.layout!r}: {name!r} has the shape "
                f"{tuple(old.shape)}, and the new values need {tuple(part.shape)}; make a new tensor of "
                "them, or load with assign=True"
            )


def _blank(part: Tensor) -> bool:
    leaves = [leaf for _, leaf in part.leaves()] if isinstance(part, QTensor) else [part]
    return not any(bool(leaf.contiguous().view(torch.uint8).any()) for leaf in leaves)


def _equal_parts(old: Tensor, source: QTensor, name: str) -> bool:
    return bool(torch.equal(old, getattr(source, name)))


def _store(target: QTensor, dense: Tensor, encode: Callable[[Tensor, Spec], Parts]) -> None:
    """Quantize `dense`, of the outward shape, into the memory of `target`."""
    _check_writable(target, None)
    if target.flat_from is not None:
        stored = dense.reshape(target.flat_from)
    else:
        inverse = [target.order.index(dim) for dim in range(target.dim())]
        stored = dense.permute(inverse)
    stored = stored.to(target.dtype).contiguous()
    parts = encode(stored, target.spec)
    _check_sizes(target, parts)
    for name, part in parts.items():
        getattr(target, name).copy_(part)


@rule(
    aten.add_.Tensor,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.div_.Tensor,
    aten.add_.Scalar,
    aten.mul_.Scalar,
    aten.lerp_.Scalar,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.addcmul_.default,
    aten.addcdiv_.default,
)
def _in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Dequantize, compute, quantize again: what merging LoRA weights or an optimizer step asks for."""
    dense = [a.dequantize() if isinstance(a, QTensor) else a for a in args]
    target = args[0]
    result = func(*dense, **kwargs)
    if not isinstance(target, QTensor):
        return result
    _store(target, result, update_parts)
    return _aliased(func, args, kwargs, target)


_SLICE_DEFAULTS: Args = (0, None, None, 1)


@rule(aten.slice.Tensor)
def _slice(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    dim, start, end, step = (*args[1:], *_SLICE_DEFAULTS[len(args) - 1 :])
    if step != 1:
        raise UnsupportedOp(f"slice with step={step} on layout {tensor.spec.layout!r}")
    dim %= tensor.dim()
    size = tensor.shape[dim]
    start = 0 if start is None else max(start + size, 0) if start < 0 else min(start, size)
    end = size if end is None else max(end + size, 0) if end < 0 else min(end, size)
    out = cut.narrow(tensor, dim, start, max(end - start, 0))
    return _aliased(func, args, kwargs, out)


@rule(aten.narrow.default)
def _narrow(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, start, length = args
    return cut.narrow(tensor, dim % tensor.dim(), start % (tensor.shape[dim] or 1), length)


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def _split(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, size = args[:2]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % tensor.dim()
    total = tensor.shape[dim]
    if func is aten.chunk.default:
        size = max(-(-total // size), 1)
    sizes = size if isinstance(size, (list, tuple)) else [size] * (total // size)
    if not isinstance(size, (list, tuple)) and total % size:
        sizes = [*sizes, total % size]
    sizes = sizes or [0]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pieces = [cut.narrow(tensor, dim, start, n) for start, n in zip(starts, sizes, strict=False)]
    return pieces if func is aten.chunk.default else _aliased(func, args, kwargs, pieces)


@rule(aten.select.int)
def _select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, index = args
    dim %= tensor.dim()
    size = tensor.shape[dim]
    if not -size <= index < size:
        raise IndexError(
            f"select: index={index} is out of range for dimension {dim} of size {size}"
        )
    return _aliased(func, args, kwargs, cut.select(tensor, dim, index % size))


@rule(aten.unbind.int)
def _unbind(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    dim = (args[1] if len(args) > 1 else 0) % tensor.dim()
    return [cut.select(tensor, dim, index) for index in range(tensor.shape[dim])]


@rule(aten.index_select.default)
def _index_select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, index = args
    if dim % tensor.dim() != 0:
        raise UnsupportedOp(
            f"index_select along dim={dim} on layout {tensor.spec.layout!r}: only rows of "
            "dimension 0 can be gathered"
        )
    return cut.gather_rows(tensor, index)


@rule(aten.cat.default)
def _cat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(isinstance(t, QTensor) for t in tensors):
        raise UnsupportedOp(
            "cat of quantized and dense tensors: dequantize or quantize all of them"
        )
    return cut.join(tensors, dim % tensors[0].dim())


@rule(aten.stack.default)
def _stack(func: Any, args: Args, kwargs: Kwargs) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(isinstance(t, QTensor) for t in args[0]):
        raise UnsupportedOp(
            "stack of quantized and dense tensors: dequantize or quantize all of them"
        )
    return cut.stack(args[0], dim)


@rule(aten.t.default, aten.mT.default, aten.transpose.int, aten.permute.default)
def _permute(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    if tensor.flat_from is not None:
        return _aliased(func, args, kwargs, tensor.like(tensor.parts))
    dims = list(range(tensor.dim()))
    if func is aten.t.default:
        dims.reverse()
    elif func is aten.mT.default:  # only inference mode has it whole
        dims[-2:] = dims[:-3:-1]
    elif func is aten.transpose.int:
        a, b = args[1] % len(dims), args[2] % len(dims)
        dims[a], dims[b] = dims[b], dims[a]
    else:
        dims = [d % len(dims) for d in args[1]]
    order = tuple(tensor.order[d] for d in dims)
    out = tensor.like(tensor.parts, tuple(tensor.shape[d] for d in dims), order=order)
    return _aliased(func, args, kwargs, out)


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, size = args[0], list(args[1])
    if -1 in size:
        known = 1
        for n in size:
            known *= 1 if n == -1 else n
        size[size.index(-1)] = tensor.numel() // known if known else 0
    shape = tuple(size)
    if shape == tuple(tensor.shape):
        out = tensor.like(tensor.parts)
    elif tensor.flat_from is not None and shape == tensor.flat_from:
        out = tensor.like(tensor.parts, shape, order=None, flat_from=None)
    elif not tensor.is_permuted and shape == (tensor.numel(),):
        out = tensor.like(tensor.parts, shape, order=(0,), flat_from=tuple(tensor.shape))
    elif _is_of_rows(tensor) and shape[-1] == tensor.shape[-1]:
        parts = {
            name: part.view(*shape[:-1], part.shape[-1]) for name, part in tensor.parts.items()
        }
        out = tensor.like(parts, shape, order=None)
    else:
        raise UnsupportedOp(
            f"view of {tuple(tensor.shape)} as {shape} on layout {tensor.spec.layout!r}: only the same "
            "shape, a flat view (and back), and rows in other dimensions where no block has several keep "
            "blocks together; call .dequantize() first"
        )
    return _aliased(func, args, kwargs, out)


def _is_of_rows(tensor: QTensor) -> bool:
    """Whether each row along the last dimension, as of activations, has what belongs to it by itself."""
    return (
        not tensor.is_permuted
        and not act_names(tensor.spec)
        and all(
            type(part) is not QTensor and part.shape[:-1] == tensor.shape[:-1]
            for part in tensor.parts.values()
        )
    )


@rule(aten.expand.default)
def _expand(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, size = args[:2]
    if len(size) == tensor.dim() and all(
        n in (-1, s) for n, s in zip(size, tensor.shape, strict=True)
    ):
        return _aliased(func, args, kwargs, tensor.like(tensor.parts))
    return func(tensor.dequantize(), size, **kwargs)


@rule(aten.as_strided.default)
def _as_strided(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, size, stride = args[:3]
    if tuple(size) != tuple(tensor.shape) or tuple(stride) != tensor.stride():
        raise UnsupportedOp(
            f"as_strided with size={tuple(size)}, stride={tuple(stride)} on layout "
            f"{tensor.spec.layout!r}: only the tensor's own size and stride"
        )
    return _aliased(func, args, kwargs, tensor.like(tensor.parts))


@rule(aten.empty_like.default, aten.zeros_like.default)
def _empty_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device") or tensor.device
    if func is aten.zeros_like.default and STOCHASTIC in tensor.spec.options:
        # the state that an optimizer makes for a weight that it trains
        return torch.zeros(tensor.shape, dtype=dtype, device=device)
    return cut.owned(tensor.map_leaves(lambda part: func(part, device=device), dtype=dtype))


@rule(aten.new_zeros.default, aten.new_empty.default)
def _new_zeros(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A tensor of another size in the same format, filled with codes and scales of 0.

    What all matrices share for their activations stays: it is no value of the tensor.
    """
    tensor, size = args[0].canonical(), tuple(args[1])
    if size == (0,):  # how FSDP2 makes the shard of a rank beyond the last row
        size = (0, *tensor.shape[1:])
    if tensor.is_permuted or len(size) != tensor.dim():
        raise UnsupportedOp(
            f"new_zeros of size {size} from a tensor of {tuple(tensor.shape)} in layout "
            f"{tensor.spec.layout!r}: only the same number of dimensions, and not transposed"
        )
    device = kwargs.get("device") or tensor.device
    parts, kept = {}, act_names(tensor.spec)
    for name, part in tensor.parts.items():
        needed = cut.part_size(tensor, name, size)
        if name in kept and needed == part.shape:
            parts[name] = part.to(device, copy=True)
        else:
            parts[name] = part.new_zeros(needed, device=device)
    return cut.owned(tensor.like(parts, size, dtype=kwargs.get("dtype") or tensor.dtype))


@rule(aten.is_pinned.default)
def _is_pinned(func: Any, args: Args, kwargs: Kwargs) -> bool:
    return all(leaf.is_pinned() for _, leaf in args[0].leaves())


@rule(aten.pin_memory.default, aten._pin_memory.default)
def _pin_memory(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[0].map_leaves(lambda part: part.pin_memory())


@rule(aten.equal.default)
def _equal(func: Any, args: Args, kwargs: Kwargs) -> bool:
    a, b = args
    if isinstance(a, QTensor) and isinstance(b, QTensor) and cut.same_kind(a, b):
        return all(torch.equal(getattr(a, n), getattr(b, n)) for n in a.part_names)
    dense = [t.dequantize() if isinstance(t, QTensor) else t for t in (a, b)]
    return bool(torch.equal(*dense))


@rule(aten.is_same_size.default)
def _is_same_size(func: Any, args: Args, kwargs: Kwargs) -> bool:
    return bool(args[0].shape == args[1].shape)
