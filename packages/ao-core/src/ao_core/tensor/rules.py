"""Rules of `__torch_dispatch__` that hold for every layout: views, slices, copies and moves."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from ao_core.errors import UnsupportedOp
from ao_core.spec import Spec
from ao_core.tensor import cut
from ao_core.tensor.beside import beside_names
from ao_core.tensor.input_steps import identity_steps, misfit, step_names
from ao_core.tensor.qtensor import QTensor, strides_of
from ao_core.tensor.relayout import repack
from ao_core.tensor.tables import dense_values, rule
from ao_core.tensor.updates import STOCHASTIC

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _aliased(func: Any, args: Args, kwargs: Kwargs, out: Any) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, out)


def _dim(op: str, tensor: QTensor, dim: int) -> int:
    """A dimension counted from the first, as torch checks and counts it."""
    ndim = tensor.dim()
    if not -ndim <= dim < ndim:
        raise IndexError(f"{op}: dim={dim} is out of range for a tensor of {ndim} dimensions")
    return dim % ndim


@rule(aten.detach.default, aten.alias.default)
def _alias(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    return _aliased(
        func, args, kwargs, cut.view_of(tensor, tensor.map_leaves(func, strides=tensor.stride()))
    )


@rule(aten.clone.default, aten.contiguous.default)
def _clone(func: Any, args: Args, kwargs: Kwargs) -> Any:
    # parts keep their own memory format: the logical strides are only a view of them
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
    return cut.owned(moved if device.type == "meta" else repack(moved))


@rule(aten.to.dtype)
def _to_dtype(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """How a change of dtype arrives below autograd, where it is not taken apart."""
    tensor, dtype = args[:2]
    return tensor if tensor.dtype == dtype else aten._to_copy.default(tensor, dtype=dtype)


_SLICE_DEFAULTS: Args = (0, None, None, 1)


@rule(aten.slice.Tensor)
def _slice(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    dim, start, end, step = (*args[1:], *_SLICE_DEFAULTS[len(args) - 1 :])
    if step != 1:
        raise UnsupportedOp(f"slice with step={step} on layout {tensor.spec.layout!r}")
    dim = _dim("slice", tensor, dim)
    size = tensor.shape[dim]
    start = 0 if start is None else max(start + size, 0) if start < 0 else min(start, size)
    end = size if end is None else max(end + size, 0) if end < 0 else min(end, size)
    out = cut.narrow(tensor, dim, start, max(end - start, 0))
    return _aliased(func, args, kwargs, out)


@rule(aten.narrow.default)
def _narrow(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, start, length = args
    dim = _dim("narrow", tensor, dim)
    size = tensor.shape[dim]
    if not (-size <= start <= size and 0 <= length <= (-start if start < 0 else size - start)):
        raise IndexError(
            f"narrow: start={start}, length={length} is out of range for dimension {dim} of size {size}"
        )
    return cut.narrow(tensor, dim, start + size if start < 0 else start, length)


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def _split(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, size = args[:2]
    dim = _dim("split", tensor, args[2] if len(args) > 2 else kwargs.get("dim", 0))
    total = tensor.shape[dim]
    given = list(size) if isinstance(size, (list, tuple)) else None
    if (given is None and (size < 0 or size == 0 < total)) or (
        given is not None and (min(given, default=0) < 0 or sum(given) != total)
    ):
        raise ValueError(f"split: size={size} does not divide dimension {dim} of size {total}")
    if func is aten.chunk.default:
        size = max(-(-total // size), 1)
    sizes = given or [min(size, total - start) for start in range(0, total, size or 1)] or [0]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pieces = [cut.narrow(tensor, dim, start, n) for start, n in zip(starts, sizes, strict=False)]
    return pieces if func is aten.chunk.default else _aliased(func, args, kwargs, pieces)


@rule(aten.select.int)
def _select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, index = args
    dim = _dim("select", tensor, dim)
    size = tensor.shape[dim]
    if not -size <= index < size:
        raise IndexError(
            f"select: index={index} is out of range for dimension {dim} of size {size}"
        )
    return _aliased(func, args, kwargs, cut.select(tensor, dim, index % size))


@rule(aten.unbind.int)
def _unbind(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    dim = _dim("unbind", tensor, args[1] if len(args) > 1 else 0)
    return [cut.select(tensor, dim, index) for index in range(tensor.shape[dim])]


@rule(aten.index_select.default)
def _index_select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, index = args
    if _dim("index_select", tensor, dim) != 0:
        raise UnsupportedOp(
            f"index_select along dim={dim} on layout {tensor.spec.layout!r}: only rows of "
            "dimension 0 can be gathered"
        )
    return cut.gather_rows(tensor, index)


@rule(aten.cat.default)
def _cat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if all(isinstance(t, QTensor) for t in tensors) and not any(t.flat_from for t in tensors):
        return cut.join(tensors, _dim("cat", tensors[0], dim))
    # with dense tensors, or of flat views, as DDP joins what it sends: no format holds the result
    return dense_values(func, args, kwargs)


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
        return _aliased(func, args, kwargs, cut.view_of(tensor, tensor.like(tensor.parts)))
    dims = list(range(tensor.dim()))
    if func is aten.t.default:
        dims.reverse()
    elif func is aten.mT.default:  # only inference mode has it whole
        dims[-2:] = dims[:-3:-1]
    elif func is aten.transpose.int:
        a, b = (_dim("transpose", tensor, dim) for dim in args[1:3])
        dims[a], dims[b] = dims[b], dims[a]
    else:
        dims = [_dim("permute", tensor, dim) for dim in args[1]]
        if sorted(dims) != list(range(tensor.dim())):
            raise ValueError(f"permute: dims={list(args[1])} must name each dimension once")
    order = tuple(tensor.order[d] for d in dims)
    shape, strides = (tuple(of[d] for d in dims) for of in (tensor.shape, tensor.stride()))
    out = tensor.like(tensor.parts, shape, order=order, strides=strides)
    return _aliased(func, args, kwargs, cut.view_of(tensor, out))


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
        out = tensor.like(tensor.parts, strides=tensor.stride())
    elif tensor.flat_from is not None and shape == tensor.flat_from:
        out = tensor.like(tensor.parts, shape, order=None, flat_from=None)
    elif not tensor.is_permuted and shape == (tensor.numel(),):
        out = tensor.like(tensor.parts, shape, order=(0,), flat_from=tuple(tensor.shape))
    elif _is_of_rows(tensor) and shape[-1] == tensor.shape[-1]:
        parts = {
            name: part.view(*shape[:-1], part.shape[-1]) for name, part in tensor.parts.items()
        }
        out = tensor.like(parts, shape, order=None, spec=_of_rows(tensor))
    else:
        raise UnsupportedOp(
            f"view of {tuple(tensor.shape)} as {shape} on layout {tensor.spec.layout!r}: only the same "
            "shape, a flat view (and back), and rows in other dimensions where no block has several keep "
            "blocks together; call .dequantize() first"
        )
    return _aliased(func, args, kwargs, cut.view_of(tensor, out))


@rule(aten.view.dtype)
def _view_dtype(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The bits as another dtype: how programs write 16-bit floats through numpy, as accelerate does."""
    tensor, dtype = args
    if dtype == tensor.dtype:
        return _alias(aten.alias.default, (tensor,), {})
    raise UnsupportedOp(
        f"view of a quantized tensor (layout {tensor.spec.layout!r}) as {dtype}: it has no memory of its "
        f"own, its parts {', '.join(tensor.part_names)} have. To offload a model to disk, call "
        "ao_hf.accelerate.disk_offload or dispatch_model in place of accelerate's"
    )


def _of_rows(tensor: QTensor) -> Spec:
    """The format of such rows in other dimensions: blocks have one row each, also those of WHOLE."""
    spec, ndim = tensor.spec, tensor.dim()
    if set(cut.block_of(spec, ndim)[:-1]) <= {1}:
        return spec
    return replace(spec, block=(1, spec.block[-1]))


def _is_of_rows(tensor: QTensor) -> bool:
    """Whether each row along the last dimension, as of activations, has what belongs to it by itself."""
    return (
        not tensor.is_permuted
        and not beside_names(tensor.spec)
        and not tensor.spec.input
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
        out = cut.view_of(tensor, tensor.like(tensor.parts, strides=tensor.stride()))
        return _aliased(func, args, kwargs, out)
    return func(tensor.dequantize(), size, **kwargs)


@rule(aten.as_strided.default)
def _as_strided(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The tensor itself or a transpose of it: how compiled code makes views anew."""
    tensor, size, stride = args[0], tuple(args[1]), tuple(args[2])
    stored, order = tensor.stored_shape, None
    if (size, stride) == (tuple(tensor.shape), tensor.stride()):
        order = tensor.order
    elif tensor.flat_from is None:
        order = next(
            (
                order
                for order in permutations(range(len(stored)))
                if size == tuple(stored[dim] for dim in order) and stride == strides_of(size, order)
            ),
            None,
        )
    if order is None:
        raise UnsupportedOp(
            f"as_strided with size={size}, stride={stride} on layout {tensor.spec.layout!r}: only the "
            "tensor's own size and stride, or those of a transpose of it"
        )
    made = tensor.like(tensor.parts, size, order=order, strides=stride)
    return _aliased(func, args, kwargs, cut.view_of(tensor, made))


@rule(aten.empty_like.default, aten.zeros_like.default)
def _empty_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Codes and scales of 0 for both: codes that nothing has written may stand for no value at all."""
    tensor = args[0]
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device") or tensor.device
    if func is aten.zeros_like.default and STOCHASTIC in tensor.spec.options:
        # the state that an optimizer makes for a weight that it trains
        return torch.zeros(tensor.shape, dtype=dtype, device=device)
    made = tensor.map_leaves(lambda part: torch.zeros_like(part, device=device), dtype=dtype)
    for name in step_names(tensor.spec):  # no zeros can be in their place
        setattr(made, name, getattr(tensor, name).to(device, copy=True))
    return cut.owned(made)


@rule(aten.full_like.default, aten.ones_like.default)
def _full_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Dense: a number that the format need not hold, as the state of an optimizer begins with."""
    kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
    return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)


@rule(aten.new_zeros.default, aten.new_empty.default)
def _new_zeros(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A tensor of another size in the same format, filled with codes and scales of 0.

    What all matrices share for their activations stays: it is not a value of the tensor. Input steps that do
    not fit the size become steps that change nothing.
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
    if reason := misfit(tensor.spec, size):
        raise UnsupportedOp(f"new_zeros of size {size} as {tensor.spec}: {reason}")
    parts, kept, steps = {}, beside_names(tensor.spec), step_names(tensor.spec)
    for name, part in tensor.parts.items():
        needed = cut.part_size(tensor, name, size)
        if name in kept and needed == part.shape:
            parts[name] = part.to(device, copy=True)
        elif name in steps:
            parts[name] = identity_steps(name, needed, device)
        else:
            parts[name] = part.new_zeros(needed, device=device)
    return cut.owned(tensor.like(parts, size, dtype=kwargs.get("dtype") or tensor.dtype))


@rule(aten.is_pinned.default)
def _is_pinned(func: Any, args: Args, kwargs: Kwargs) -> bool:
    return all(leaf.is_pinned() for _, leaf in args[0].leaves())


@rule(aten.pin_memory.default, aten._pin_memory.default)
def _pin_memory(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return cut.owned(args[0].map_leaves(lambda part: part.pin_memory()))


@rule(aten.equal.default)
def _equal(func: Any, args: Args, kwargs: Kwargs) -> bool:
    a, b = args
    if isinstance(a, QTensor) and isinstance(b, QTensor) and cut.same_kind(a, b):
        return all(_equal_parts(getattr(a, n), getattr(b, n)) for n in a.part_names)
    dense = [t.dequantize() if isinstance(t, QTensor) else t for t in (a, b)]
    return bool(torch.equal(*dense))


def _equal_parts(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() and a.element_size() == 1:  # torch cannot compare float8
        a, b = a.float(), b.float()
    return torch.equal(a, b)


@rule(aten.is_same_size.default)
def _is_same_size(func: Any, args: Args, kwargs: Kwargs) -> bool:
    return bool(args[0].shape == args[1].shape)
