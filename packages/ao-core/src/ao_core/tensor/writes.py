"""Rules that write a `QTensor`: copies into it, and arithmetic in place, one by one or in lists.

A slice of a layout that cannot be cut in place is written in its canonical layout, and the whole is
packed anew; see `cut.Origin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from ao_core.errors import UnsupportedOp
from ao_core.layouts import Parts
from ao_core.spec import Spec
from ao_core.tensor import cut
from ao_core.tensor.beside import beside_names
from ao_core.tensor.checks import check_quantizable
from ao_core.tensor.encoding import encode_parts
from ao_core.tensor.experts import is_traced
from ao_core.tensor.input_steps import step_weight, stored_spec
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import to_layout
from ao_core.tensor.tables import rule
from ao_core.tensor.updates import STOCHASTIC, is_stochastic, update_parts

__all__ = ["check_values", "encode_logical", "overwrite"]

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@rule(aten.copy_.default)
def _copy_(func: Any, args: Args, kwargs: Kwargs) -> Any:
    target, source = args[:2]
    if not isinstance(target, QTensor):
        return func(target, source.dequantize(), *args[2:], **kwargs)
    if isinstance(source, QTensor):
        source = _in_layout_of(target, source)
    if isinstance(source, QTensor) and cut.same_kind(target, source):
        with _written(target):
            _check_writable(target, source)
            _check_parts(target, source.parts)
            for name in target.part_names:
                getattr(target, name).copy_(getattr(source, name), *args[2:])
    else:
        dense = (
            source.dequantize()
            if isinstance(source, QTensor)
            else torch.as_tensor(source, device=target.device)
        )
        check_values(dense, target)
        dense = dense.to(target.device).expand(target.shape)
        if not _holds(target, dense):
            encode = update_parts if is_stochastic(target.spec) else encode_parts
            _store(target, dense, encode)
    return return_and_correct_aliasing(func, args, kwargs, target)


def _in_layout_of(target: QTensor, source: QTensor) -> QTensor:
    """The source as the target is laid out, where no more than that is between them: codes stay as they are.

    The slice of a weight in the layout of a kernel is canonical, and what a loader writes into it is not.
    """
    layout = target.spec.layout
    if source.shape != target.shape or source.spec.in_layout(layout) != target.spec:
        return source
    try:
        return to_layout(source, layout)
    except UnsupportedOp:
        return source


def _holds(target: QTensor, dense: Tensor) -> bool:
    """Whether a tensor has these very values: quantizing them again would change them.

    DDP sends dense values to all ranks, which come back to a rank that has them; and to make its state,
    `torch.distributed.checkpoint` lets an optimizer step at a learning rate of 0.
    """
    if is_traced(dense) or not dense.is_floating_point():  # other values would be equal as integers
        return False
    return torch.equal(target.dequantize(dense.dtype), dense)


def overwrite(target: QTensor, dense: Tensor) -> None:
    """Quantize `dense` into the memory of `target`, whatever its values; NaN spreads over its block."""
    _store(target, dense, encode_parts)


def check_values(dense: Tensor, target: QTensor, name: str = "the source of copy_") -> None:
    """Raise `QuantizationError` for values that quantizing would not keep: NaN and inf.

    What has no values, as on the meta device, passes, and so do formats without a scale.
    """
    has_values = type(dense) in (Tensor, torch.nn.Parameter) and dense.device.type != "meta"
    if has_values and dense.is_floating_point() and target.format.has_scale:
        check_quantizable(dense, f"{name}, to be quantized to {target.spec},")


@contextmanager
def _written(target: QTensor) -> Iterator[None]:
    """Around a write to the parts of `target`, so that it reaches the memory they stand for."""
    origin = target._origin
    if origin is not None:
        origin.refresh()
    yield
    if origin is not None:
        origin.write_back()


def _check_writable(target: QTensor, source: QTensor | None) -> None:
    """Refuse to write where other elements share a part, unless it keeps, or first gets, its value.

    Dense values, in place of a `source`, leave scales of activations and input steps alone.
    """
    for name in target._borrowed - set(beside_names(target.spec) if source is None else ()):
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


def _check_parts(target: QTensor, parts: Parts) -> None:
    """Refuse parts of other sizes than there is memory for, where the values decide on sizes.

    Parts that are quantized are checked as the tensor is: nothing is written before all can be.
    """
    for name, part in parts.items():
        old = getattr(target, name)
        if isinstance(old, QTensor) and isinstance(part, QTensor):
            _check_writable(old, part if cut.same_kind(old, part) else None)
            _check_parts(old, part.parts)
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


def encode_logical(
    target: QTensor,
    dense: Tensor,
    spec: Spec,
    encode: Callable[[Tensor, Spec], Parts] = encode_parts,
) -> Parts:
    """The parts of `dense`, of the logical shape of `target`, with its dimensions as `target` stores them.

    They are encoded after the input steps of `target`, and `spec` may differ from its own in the layout.
    """
    if target.flat_from is not None:
        stored = dense.reshape(target.flat_from)
    else:
        inverse = [target.order.index(dim) for dim in range(target.dim())]
        stored = dense.permute(inverse)
    if spec.input:
        stored, spec = step_weight(stored, spec, target.parts), stored_spec(spec)
    return encode(stored.contiguous(), spec)


def _store(target: QTensor, dense: Tensor, encode: Callable[[Tensor, Spec], Parts]) -> None:
    """Quantize `dense`, of the logical shape, into the memory of `target`."""
    with _written(target):
        _check_writable(target, None)
        parts = encode_logical(target, dense.to(target.dtype), target.spec, encode)
        _check_parts(target, parts)
        for name, part in parts.items():
            getattr(target, name).copy_(part)


def _update(target: QTensor, dense: Tensor) -> None:
    """Write the result of an operation in place; where rounding is random, only if it changed something."""
    if STOCHASTIC not in target.spec.options or not _holds(target, dense):
        _store(target, dense, update_parts)


#: dequantize, compute, quantize again: what merging LoRA weights or an optimizer step asks for
_IN_PLACE = (
    aten.add_.Tensor,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.div_.Tensor,
    aten.add_.Scalar,
    aten.mul_.Scalar,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.addcmul_.default,
    aten.addcdiv_.default,
)


@rule(*_IN_PLACE)
def _in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    dense = [a.dequantize() if isinstance(a, QTensor) else a for a in args]
    target = args[0]
    result = func(*dense, **kwargs)
    if not isinstance(target, QTensor):
        return result
    _update(target, result)
    return return_and_correct_aliasing(func, args, kwargs, target)


#: steps of torch's optimizers as one op, with ``fused=True``; parameters are the first list of tensors
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def _of_lists() -> list[Any]:
    """The ops on lists of tensors, as optimizers and averages call them, that change the first of them."""
    names = {op.overloadpacket.__name__.rstrip("_") for op in _IN_PLACE}
    found = (*(f"_foreach_{name}_" for name in sorted(names)), *_FUSED)
    packets = [getattr(aten, name, None) for name in found]
    return [
        getattr(each, name) for each in packets if each is not None for name in each.overloads()
    ]


@rule(*(op for op in _of_lists() if not op._overloadname.endswith("out")))
def _in_place_lists(func: Any, args: Args, kwargs: Kwargs) -> None:
    """One op for all on dequantized copies, which are then written one by one."""
    targets = args[0]
    for target in targets:
        if isinstance(target, QTensor):
            _check_writable(target, None)
    leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
    dense = [leaf.dequantize() if isinstance(leaf, QTensor) else leaf for leaf in leaves]
    args, kwargs = torch.utils._pytree.tree_unflatten(dense, tree)
    func(*args, **kwargs)
    for target, values in zip(targets, args[0], strict=True):
        if isinstance(target, QTensor):
            _update(target, values)


@rule(aten._foreach_copy_.default)
def _copy_lists(func: Any, args: Args, kwargs: Kwargs) -> None:
    for target, source in zip(*args[:2], strict=True):
        target.copy_(source, *args[2:], **kwargs)
