"""`QTensor`: the tensor whose memory is low precision."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ao_core.arguments import shown
from ao_core.dispatch import fingerprint
from ao_core.errors import ConfigError
from ao_core.layouts import Layout, Parts
from ao_core.records import DType
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.codec import decode_parts
from ao_core.tensor.tables import FUNCTIONS, RULES, refuse_tracing, without_rule
from ao_core.tensor.wrapper import Wrapper

__all__ = ["QTensor", "strides_of"]

Order = tuple[int, ...]

# every function of torch with a QTensor asks; an attribute takes a fiftieth of an eager call
_is_tracing = torch._C._is_tracing
_is_compiling = torch.compiler.is_compiling

#: what makes a tensor what it is, next to its parts
_STATE = ("spec", "part_names", "order", "flat_from", "is_permuted")
#: attributes that are not pickled
_OF_THIS_PROCESS = ("_bound", "_borrowed", "_origin")


class QTensor(Tensor):
    """A tensor of `shape` and logical `dtype` whose parts hold codes and scales, as `spec` says.

    The parts are attributes (`qdata`, `scale`, `zero_point`, …), named by the layout; any part may itself be
    a `QTensor` (double quantization). `order` is the permutation from stored to logical dimensions,
    so that every layout can be transposed without touching memory; `flat_from` is the stored shape
    where the logical view is flattened. `strides` are those of a contiguous tensor unless the tensor
    is a slice of a larger one, whose strides it has, as slices of dense tensors do.
    """

    spec: Spec
    # the usual parts; a layout may have others, and formats without a zero point have none
    qdata: Tensor
    scale: Tensor
    zero_point: Tensor
    order: Order
    flat_from: tuple[int, ...] | None
    part_names: tuple[str, ...]

    @staticmethod
    def __new__(
        cls: type[QTensor],
        parts: Parts,
        spec: Spec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        order: Order | None = None,
        flat_from: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        requires_grad: bool = False,
    ) -> QTensor:
        """The wrapper that torch sees: shape, dtype and device, but no memory of its own."""
        given: tuple[object, object] = (parts, spec)  # which anybody may pass
        named = isinstance(given[0], dict) and all(isinstance(p, Tensor) for p in parts.values())
        if not (isinstance(given[1], Spec) and named and parts):
            raise ConfigError(
                f"parts={shown(parts)}, spec={shown(spec)}: a QTensor is made of named tensors and a Spec"
            )
        first = next(iter(parts.values()))
        return Tensor._make_wrapper_subclass(
            cls,
            torch.Size(shape),
            strides=strides_of(shape, order) if strides is None else strides,
            dtype=dtype,
            device=first.device,
            requires_grad=requires_grad,
        )

    def __init__(
        self,
        parts: Parts,
        spec: Spec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        order: Order | None = None,
        flat_from: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        requires_grad: bool = False,
    ) -> None:
        self.spec = spec
        self.part_names = tuple(parts)
        for name, part in parts.items():
            setattr(self, name, part)
        identity = tuple(range(len(shape)))
        self.order = identity if order is None else order
        self.flat_from = flat_from
        #: whether dimensions are permuted or flattened with respect to what is stored
        self.is_permuted = flat_from is not None or self.order != identity
        # the kernel of each kind of call, found once, and what kernels keep with a weight; see `matmuls`
        self._bound: dict[Any, Any] = {}
        #: parts that other elements of a larger tensor need too, or that are a copy of theirs
        self._borrowed: frozenset[str] = frozenset()
        #: of a slice of a layout that cannot be cut in place: what a write must reach; see `cut.Origin`
        self._origin: Any = None

    # -- what it is ------------------------------------------------------------------------------

    @property
    def parts(self) -> Parts:
        """The stored tensors by name."""
        return {name: getattr(self, name) for name in self.part_names}

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Logical shape of what is stored, before `order` and flattening."""
        if self.flat_from is not None:
            return self.flat_from
        shape = self.shape  # which takes a call of `__torch_function__`
        if not self.is_permuted:
            return tuple(shape)
        stored = [0] * len(shape)
        for logical, inner in enumerate(self.order):
            stored[inner] = shape[logical]
        return tuple(stored)

    @property
    def layout_record(self) -> Layout:
        """The registered layout."""
        return registry.layouts.get(self.spec.layout)

    @property
    def format(self) -> DType:
        """The registered number format of the codes."""
        return registry.dtypes.get(self.spec.dtype)

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Plain tensors that hold the memory, with dotted names ("qdata", "scale.qdata", …)."""
        for name, part in self.parts.items():
            if isinstance(part, QTensor):
                yield from part.leaves(f"{prefix}{name}.")
            else:
                yield prefix + name, part

    @property
    def stored_bytes(self) -> int:
        """Bytes of memory in all parts."""
        return sum(leaf.numel() * leaf.element_size() for _, leaf in self.leaves())

    @property
    def sparsity(self) -> float | None:
        """The share of elements that the layout does not store, since they are zeros; None: it stores all."""
        base = self.canonical()
        return base.layout_record.sparsity(base.parts, base.spec, base.stored_shape)

    def like(self, parts: Parts, shape: tuple[int, ...] | None = None, **changes: Any) -> QTensor:
        """A `QTensor` of the same kind around other parts; `changes` are constructor arguments."""
        values = {
            "spec": self.spec,
            "dtype": self.dtype,
            "order": self.order,
            "flat_from": self.flat_from,
            **changes,
        }
        out = QTensor(parts, shape=tuple(self.shape if shape is None else shape), **values)
        out._borrowed = self._borrowed
        return out

    def map_leaves(self, fn: Callable[[Tensor], Tensor], **changes: Any) -> QTensor:
        """The same tensor with `fn` applied to every part (also to nested ones)."""
        return self.like({name: fn(part) for name, part in self.parts.items()}, **changes)

    def adopt(self, other: QTensor) -> None:
        """Become `other`: share its parts and take its shape and format, as `.data = other` does."""
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        for name in set(self.part_names) - set(other.part_names):
            delattr(self, name)
        for name in (*_STATE, *other.part_names):
            setattr(self, name, getattr(other, name))
        self._bound = {}
        self._borrowed, self._origin = other._borrowed, other._origin

    # -- values ----------------------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a dense tensor of the logical shape, in `dtype` or the logical dtype."""
        dense = decode_parts(self.parts, self.spec, self.stored_shape, dtype or self.dtype)
        if self.flat_from is not None:
            return dense.reshape(-1)
        return dense.permute(self.order) if self.is_permuted else dense

    def canonical(self) -> QTensor:
        """The same codes and scales in the canonical layout, bit for bit."""
        from ao_core.tensor.relayout import to_canonical

        return to_canonical(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"QTensor({tuple(self.shape)}, {self.spec}, dtype={self.dtype}, device={self.device})"
        )

    # -- protocols of torch ----------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.part_names), (self.spec, self.dtype, self.order, self.flat_from)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Parts, meta: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> QTensor:
        spec, dtype, order, flat_from = meta
        strides = None if outer_stride is None else tuple(outer_stride)
        return cls(
            inner, spec, tuple(outer_size), dtype, order=order, flat_from=flat_from, strides=strides
        )

    def _stable_hash_for_caching(self) -> str:
        leaves = [(n, tuple(t.shape), t.stride(), t.dtype, t.device) for n, t in self.leaves()]
        meta = (self.spec, self.dtype, self.order, self.flat_from, tuple(self.shape))
        text = repr((meta, self.requires_grad, leaves, fingerprint(self.device.type)))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        # bound kernels and lent memory belong to this process
        return {name: v for name, v in self.__dict__.items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _bound={}, _borrowed=frozenset(), _origin=None)

    def __deepcopy__(self, memo: dict[int, Any]) -> QTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        with torch.no_grad():
            copy = self.map_leaves(torch.clone)
        copy._borrowed = frozenset()
        copy.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):  # how torch marks a subclass as a Parameter
            copy._is_param = True
        memo[id(self)] = copy
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_tracing():
            refuse_tracing()
        # While tracing, the choice of kernels happens below autograd, in `__torch_dispatch__`, where
        # it is run, not traced.
        if not _is_compiling():
            fast = FUNCTIONS.get(func)
            if fast is not None:
                out = fast(*args, **(kwargs or {}))
                if out is not NotImplemented:
                    return out
        elif torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            from ao_core.tensor.matmuls import exported

            out = exported(func, args, kwargs or {})
            if out is not NotImplemented:
                return out
        if _has_matmuls_of_its_own(types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _has_matmuls_of_its_own(types):
            return NotImplemented
        rule = RULES.get(func, without_rule)
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            # a view of a tensor that autograd knows is one too, also here
            with torch.inference_mode(False):
                return rule(func, args, kwargs or {})
        return rule(func, args, kwargs or {})

    # -- FSDP2; see `sharding` -------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The plain tensors of this shard that FSDP2 gathers."""
        from ao_core.tensor.fsdp import pre_all_gather

        return pre_all_gather(self, tuple(outer_size), mesh.size())

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """The whole parameter around the gathered parts."""
        from ao_core.tensor.fsdp import post_all_gather

        return post_all_gather(self, outputs, metadata, param_dtype, out)


def _has_matmuls_of_its_own(types: Any) -> bool:
    """Whether a `Wrapper` is among the types: it casts activations, or takes them as they are."""
    return any(issubclass(other, Wrapper) for other in types)


def strides_of(shape: tuple[int, ...], order: Order | None) -> tuple[int, ...]:
    """Strides of a contiguous tensor whose dimensions were permuted by `order`."""
    order = tuple(range(len(shape))) if order is None else order
    stored_stride = [1] * len(shape)
    sizes = [1] * len(shape)
    for logical, inner in enumerate(order):
        sizes[inner] = shape[logical]
    for dim in range(len(shape) - 2, -1, -1):
        stored_stride[dim] = stored_stride[dim + 1] * max(sizes[dim + 1], 1)
    return tuple(stored_stride[inner] for inner in order)
