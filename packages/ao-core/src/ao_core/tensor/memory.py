"""What torch and other programs do with the memory of a tensor: `.data = `, sharing, addresses, dlpack.

A `QTensor` has no memory of its own: its parts do. What can be done part by part is; what hands out an
address is refused, since there is none. A `ComputeWeight` hands out its own high-precision memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from ao_core.errors import StorageError, UnsupportedOp
from ao_core.tensor.beside import beside_names
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import repack
from ao_core.tensor.sharding import is_sharded
from ao_core.tensor.tables import FUNCTIONS, function
from ao_core.tensor.wrapper import dense_memory
from ao_core.tensor.writes import check_values, encode_logical

__all__ = ["checked_data"]


# -- assignment ------------------------------------------------------------------------------------


@function(Tensor.data.__set__)  # type: ignore[attr-defined]
def _assign(target: QTensor, value: Any) -> None:
    """``target.data = value``: its values, shape, dtype and device.

    Another quantized tensor is taken as it is, parts and format; dense values are quantized to the
    format there is.
    """
    value = dense_memory(checked_data(target, value))
    if not isinstance(value, QTensor):
        check_values(value, target, "the tensor assigned to .data")
        value = _quantized_as(target, value.detach())
    target.adopt(value)


def checked_data(target: Tensor, value: Any) -> Tensor:
    """`value` if it can be assigned to ``target.data``.

    Raises:
        TypeError: it is not a tensor.
        UnsupportedOp: its number of dimensions or its dtype is another, or it is a `DTensor`.
    """
    kind = type(target).__name__
    if not isinstance(value, Tensor):
        raise TypeError(f".data of a {kind} was assigned a {type(value).__name__}; assign a tensor")
    if value.dim() != target.dim() or (value.shape != target.shape and target.dim() == 1):
        raise UnsupportedOp(
            f".data of a {kind} of shape {tuple(target.shape)} was assigned a tensor of shape "
            f"{tuple(value.shape)}; for another number of dimensions, and for a flat view, replace the "
            "parameter: module.weight = torch.nn.Parameter(...)"
        )
    if not value.is_floating_point():
        raise UnsupportedOp(
            f".data of a {kind} was assigned a tensor of {value.dtype}; assign floating-point values"
        )
    if is_sharded(value):
        raise UnsupportedOp(f".data of a {kind} was assigned a DTensor; assign its local values")
    return value


def _quantized_as(target: QTensor, dense: Tensor) -> QTensor:
    """`dense` in the format of `target`; in another dtype or on another device, in the layout for those."""
    layout = target.layout_record
    moves = (dense.dtype, dense.device.type) != (target.dtype, target.device.type)
    spec = target.spec
    if moves and not layout.canonical:
        spec = spec.in_layout(layout.canonical_name)
    parts = encode_logical(target, dense, spec)
    kept = {n: target.parts[n].to(dense.device) for n in beside_names(target.spec)}
    out = target.like(parts | kept, tuple(dense.shape), spec=spec, dtype=dense.dtype)
    out._borrowed = frozenset()
    return repack(out) if spec is not target.spec else out


# -- sharing between processes ---------------------------------------------------------------------


@function(Tensor.share_memory_)
def _share_memory(tensor: QTensor) -> QTensor:
    for _, leaf in tensor.leaves():
        leaf.share_memory_()
    return tensor


@function(Tensor.is_shared)
def _is_shared(tensor: QTensor) -> bool:
    return all(leaf.is_shared() for _, leaf in tensor.leaves())


# -- addresses -------------------------------------------------------------------------------------

#: what reads or writes memory by its address, and what works in its place; not `untyped_storage`, which
#: torch asks for while tracing: what that gives has no address, and programs that save then ask for `storage`
_ADDRESSES: dict[Any, str] = {
    Tensor.__array__: "call .dequantize().numpy()",
    Tensor.__dlpack__: "export .dequantize(), or the parts",
    Tensor.apply_: "compute on .dequantize()",
    Tensor.map2_: "compute on .dequantize()",
    Tensor.map_: "compute on .dequantize()",
    Tensor.numpy: "call .dequantize().numpy(). To offload a model to disk, call "
    "ao_hf.accelerate.disk_offload or dispatch_model in place of accelerate's",
    Tensor.storage: "ask .leaves(), which gives the parts. To save a model, call ao_core.save_model, or "
    "save_model and register_checkpoints of ao_hf.accelerate: save_pretrained of other programs and "
    "save_file of safetensors cannot write it",
    Tensor.tolist: "call .dequantize().tolist()",
}


def _refusing(func: Any, instead: str) -> Callable[..., NoReturn]:
    name = getattr(func, "__name__", str(func))
    error = StorageError if func is Tensor.storage else UnsupportedOp

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        # where the tensor itself is dense, an argument is quantized
        tensor = next(arg for arg in args if isinstance(arg, QTensor))
        raise error(
            f"{name} of a quantized tensor (layout {tensor.spec.layout!r}): it has no memory of its own, its "
            f"parts {', '.join(tensor.part_names)} have; {instead}"
        )

    return refuse


#: `const_data_ptr` is younger than the oldest torch that ao supports
_POINTERS = [
    getattr(Tensor, name) for name in ("data_ptr", "const_data_ptr") if hasattr(Tensor, name)
]


@function(*_POINTERS)
def _data_ptr(tensor: QTensor) -> int:
    """The address of the first part: programs tell tensors apart by it, and ask for the storage to read."""
    return next(leaf for _, leaf in tensor.leaves()).data_ptr()


for _func, _instead in _ADDRESSES.items():
    FUNCTIONS[_func] = _refusing(_func, _instead)
