"""`ComputeWeight`: the tensor whose memory is in high precision and whose matmuls are in low precision."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from ao_core.arguments import shown
from ao_core.compute import gather
from ao_core.compute.matmuls import Matmuls
from ao_core.dispatch import fingerprint
from ao_core.errors import ConfigError, UnsupportedOp
from ao_core.spec import Spec
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.tables import refuse_tracing
from ao_core.tensor.wrapper import Wrapper

__all__ = ["FUNCTIONS", "MATMULS", "ComputeWeight", "on_memory"]

aten = torch.ops.aten

#: torch function -> what takes its place where a weight is among the arguments
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
#: aten overload -> rule(func, args, kwargs), below autograd
MATMULS: dict[Any, Callable[..., Any]] = {}


class ComputeWeight(Wrapper):
    """A weight (N, K) that is stored in high precision and cast for each matmul it takes part in.

    A linear layer has three matmuls, written ``a @ b.T`` with the contracted dimension last in both. Each has
    a `Spec` that says how b is cast and, in its `act`, how a is; None: high precision.

    - `output`: a = input (M, K), b = weight (N, K)
    - `grad_input`: a = gradient (M, N), b = weight transposed (K, N)
    - `grad_weight`: a = gradient transposed (N, M), b = input transposed (K, M)

    The weights of experts are 3-D, (E, N, K) or (E, K, N), and multiplied with `torch._grouped_mm`,
    `torch.bmm` or one by one; each expert is cast by itself (see `experts`).
    """

    #: the dense values; after FSDP2 gathered them as such, the codes of the cast weight (see `gather`)
    memory: Tensor
    matmuls: Matmuls
    transposed: bool
    #: shared by all that was made from this weight, its shards above all
    gather_state: gather.GatherState

    @staticmethod
    def __new__(
        cls: type[ComputeWeight],
        memory: Tensor,
        output: Spec | None,
        grad_input: Spec | None = None,
        grad_weight: Spec | None = None,
        *,
        transposed: bool = False,
        requires_grad: bool = False,
    ) -> ComputeWeight:
        """The wrapper that torch sees: shape, dtype and device, but no memory of its own."""
        if not isinstance(memory, Tensor):
            raise ConfigError(f"memory={shown(memory)}: a ComputeWeight is made of a Tensor")
        for spec in (output, grad_input, grad_weight):
            if spec is not None and not isinstance(spec, Spec):
                raise ConfigError(
                    f"output, grad_input or grad_weight={shown(spec)}: give a Spec, or None for high "
                    "precision"
                )
            if spec is not None and spec.input:
                raise ConfigError(
                    f"{spec}: a ComputeWeight, whose memory is dense, has no input steps; use a spec without"
                )
        return Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            dtype=memory.dtype,
            device=memory.device,
            requires_grad=requires_grad,
        )

    def __init__(
        self,
        memory: Tensor,
        output: Spec | None,
        grad_input: Spec | None = None,
        grad_weight: Spec | None = None,
        *,
        transposed: bool = False,
        requires_grad: bool = False,
    ) -> None:
        self.memory = memory
        self.matmuls = Matmuls(output, grad_input, grad_weight)
        self.transposed = transposed
        self.gather_state = gather.GatherState()

    def like(self, memory: Tensor, transposed: bool | None = None) -> ComputeWeight:
        """The same matmuls around other memory."""
        flag = self.transposed if transposed is None else transposed
        out = ComputeWeight(memory, *self.matmuls, transposed=flag)
        out.gather_state = self.gather_state
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ComputeWeight({tuple(self.shape)}, {self.matmuls}, dtype={self.dtype})"

    def summary(self) -> str:
        """The number formats of its matmuls."""
        named = self.matmuls._asdict().items()
        return ", ".join(f"{name} {spec.dtype if spec else 'not cast'}" for name, spec in named)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["memory"], (self.matmuls, self.transposed)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> ComputeWeight:
        matmuls, transposed = meta
        return cls(inner["memory"], *matmuls, transposed=transposed)

    def _stable_hash_for_caching(self) -> str:
        held: Any = (tuple(self.shape), self.memory.stride(), self.dtype, self.device)
        if isinstance(self.memory, QTensor):
            held = self.memory._stable_hash_for_caching()
        kernels = fingerprint(self.device.type)
        text = repr((self.matmuls, self.transposed, self.requires_grad, held, kernels))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __deepcopy__(self, memo: dict[int, Any]) -> ComputeWeight:
        if id(self) not in memo:
            copy = self.like(self.memory.detach().clone())
            copy.requires_grad_(self.requires_grad)
            copy.gather_state = gather.GatherState()
            if getattr(self, "_is_param", False):  # how torch marks a subclass as a Parameter
                copy._is_param = True
            memo[id(self)] = copy
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A parameter is pickled as it is, but what a state dict holds as its memory alone.

        So that checkpoints of a training run are plain: they load where ao is not installed.
        """
        if getattr(self, "_is_param", False):
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return self.memory.__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "gather_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, gather_state=gather.GatherState())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch._C._is_tracing():
            refuse_tracing()
        kwargs = kwargs or {}
        fn = FUNCTIONS.get(func)
        if fn is not None:
            return fn(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        matmul = MATMULS.get(func)
        if matmul is not None:
            return matmul(func, args, kwargs)
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            # a view of a tensor that autograd knows is one too, also here
            with torch.inference_mode(False):
                return on_memory(func, args, kwargs)
        return on_memory(func, args, kwargs)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The plain tensors of this shard that FSDP2 gathers."""
        return gather.pre_all_gather(self, mesh, tuple(outer_size), mp_policy)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """The whole weight around what was gathered."""
        return gather.post_all_gather(self, outputs, metadata, out)


#: ops after which a weight is still one
_KEEPS = {
    aten.alias.default,
    aten._to_copy.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.narrow.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten._pin_memory.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.view.default,
}
_TRANSPOSES = {aten.t.default, aten.transpose.int}


def _turns(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op swaps the last two dimensions alone, in other words: `Tensor.T` permutes."""
    if func is not aten.permute.default:
        return False
    n = args[0].dim()
    return [dim % n for dim in args[1]] == [*range(n - 2), n - 1, n - 2]


def _is_expert(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op takes 2-D weights out of those of experts."""
    of_experts = func in (aten.select.int, aten.unbind.int) and args[0].dim() == 3
    return of_experts and (len(args) == 1 or args[1] in (0, -3))


def on_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on the high-precision memory; structural ops give a `ComputeWeight` again."""
    leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
    first = next(leaf for leaf in leaves if isinstance(leaf, ComputeWeight))
    if isinstance(first.memory, QTensor) and func not in _KEEPS:
        raise UnsupportedOp(
            f"{func} on a weight that FSDP2 gathered as codes for its matmuls: it would read rounded "
            f"values, e.g. in a lookup tied to it; convert it without {gather.FLOAT8_ALL_GATHER}"
        )
    plain = [leaf.memory if isinstance(leaf, ComputeWeight) else leaf for leaf in leaves]
    plain_args, plain_kwargs = torch.utils._pytree.tree_unflatten(plain, tree)
    out = func(*plain_args, **plain_kwargs)
    turns = _turns(func, args)
    if func in _KEEPS or turns or _is_expert(func, args):
        flag = first.transposed != (turns or func in _TRANSPOSES)
        out = torch.utils._pytree.tree_map_only(Tensor, lambda t: first.like(t, flag), out)
        return return_and_correct_aliasing(func, args, kwargs, out)
    mutates = func._schema.is_mutable and args and isinstance(args[0], ComputeWeight)
    return return_and_correct_aliasing(func, args, kwargs, args[0]) if mutates else out


#: what optimizers do to weights
_UPDATES = (
    aten.add_.Tensor,
    aten.addcdiv_.default,
    aten.addcmul_.default,
    aten.lerp_.Scalar,
    aten.mul_.Tensor,
    aten.sub_.Tensor,
)


def _update(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`on_memory` of an op in place, without a look at its schema, which takes longer than small updates."""
    weight, *others = args
    if not isinstance(weight, ComputeWeight) or isinstance(weight.memory, QTensor):
        return on_memory(func, args, kwargs)
    plain = [other.memory if isinstance(other, ComputeWeight) else other for other in others]
    func(weight.memory, *plain, **kwargs)
    return weight


MATMULS.update(dict.fromkeys(_UPDATES, _update))
