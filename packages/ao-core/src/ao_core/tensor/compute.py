"""`ComputeWeight`: the tensor whose memory is high precision and whose products are low precision."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from ao_core.arguments import shown
from ao_core.dispatch import fingerprint, run
from ao_core.errors import ConfigError, UnsupportedOp
from ao_core.records import Call
from ao_core.spec import Spec
from ao_core.tensor import gather
from ao_core.tensor.codec import autocasted
from ao_core.tensor.emulated import is_one_node
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.tables import refuse_tracing

__all__ = [
    "FUNCTIONS",
    "PRODUCTS",
    "ComputeWeight",
    "Specs",
    "cast_product",
    "dense_memory",
    "linear",
    "on_memory",
]

aten = torch.ops.aten

#: of the output, the input's gradient and the weight's gradient; None: high precision
Specs = tuple[Spec | None, Spec | None, Spec | None]


class ComputeWeight(Tensor):
    """A weight (N, K) that stays in `hp` and is cast for each product it takes part in.

    Each of the three products of a linear layer, written ``a @ b.T`` with the contracted dimension last
    in both, has a `Spec` that says how b is cast and, in its `act`, how a is; None: high precision.

    - `output`: a = input (M, K), b = weight (N, K)
    - `grad_input`: a = gradient (M, N), b = weight transposed (K, N)
    - `grad_weight`: a = gradient transposed (N, M), b = input transposed (K, M)

    The weights of experts are 3-D, (E, N, K) or (E, K, N), and multiplied with `torch._grouped_mm`,
    `torch.bmm` or one by one; each expert is cast by itself (see `compute_experts`).
    """

    #: says what becomes of other tensors beside it, also of a `QTensor` of activations
    OWNS_PRODUCTS = True
    #: the memory; or, after FSDP2 gathered them, the codes of the cast weight (see `gather`)
    hp: Tensor
    specs: Specs
    transposed: bool
    #: shared by all that was made from this weight, its shards above all
    whole: gather.Whole

    @staticmethod
    def __new__(
        cls: type[ComputeWeight],
        hp: Tensor,
        output: Spec | None,
        grad_input: Spec | None = None,
        grad_weight: Spec | None = None,
        *,
        transposed: bool = False,
        requires_grad: bool = False,
    ) -> ComputeWeight:
        """The wrapper that torch sees: shape, dtype and device, but no memory of its own."""
        if not isinstance(hp, Tensor):
            raise ConfigError(f"hp={shown(hp)}: a ComputeWeight is made of a Tensor")
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
            hp.shape,
            strides=hp.stride(),
            dtype=hp.dtype,
            device=hp.device,
            requires_grad=requires_grad,
        )

    def __init__(
        self,
        hp: Tensor,
        output: Spec | None,
        grad_input: Spec | None = None,
        grad_weight: Spec | None = None,
        *,
        transposed: bool = False,
        requires_grad: bool = False,
    ) -> None:
        self.hp = hp
        self.specs = (output, grad_input, grad_weight)
        self.transposed = transposed
        self.whole = gather.Whole()

    def like(self, hp: Tensor, transposed: bool | None = None) -> ComputeWeight:
        """The same casts around other memory."""
        flag = self.transposed if transposed is None else transposed
        out = ComputeWeight(hp, *self.specs, transposed=flag)
        out.whole = self.whole
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ComputeWeight({tuple(self.shape)}, {self.specs}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["hp"], (self.specs, self.transposed)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> ComputeWeight:
        specs, transposed = meta
        return cls(inner["hp"], *specs, transposed=transposed)

    def _stable_hash_for_caching(self) -> str:
        hp: Any = (tuple(self.hp.shape), self.hp.stride(), self.hp.dtype, self.hp.device)
        if isinstance(self.hp, QTensor):
            hp = self.hp._stable_hash_for_caching()
        text = repr(
            (self.specs, self.transposed, self.requires_grad, hp, fingerprint(self.device.type))
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __deepcopy__(self, memo: dict[int, Any]) -> ComputeWeight:
        if id(self) not in memo:
            copy = self.like(self.hp.detach().clone())
            copy.requires_grad_(self.requires_grad)
            copy.whole = gather.Whole()
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
        return self.hp.__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "whole"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, whole=gather.Whole())

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
        product = PRODUCTS.get(func)
        if product is not None:
            return product(func, args, kwargs)
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


def dense_memory(tensor: Tensor) -> Tensor:
    """What a `ComputeWeight` holds; any other tensor itself."""
    return tensor.hp if isinstance(tensor, ComputeWeight) else tensor


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, all three of whose products are computed as the weight says."""
    input, weight, bias = autocasted(input, weight, bias)
    # Dynamo traces no function that has a forward mode
    function = _Linear if torch.compiler.is_compiling() else _LinearWithJvp
    out: Tensor = function.apply(input, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _Linear(torch.autograd.Function):
    """The three products of a linear layer; each reaches its rule through the weight.

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
                # beta=0: the weight adds nothing, it only brings its specs to the product
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


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``x @ w.T`` (output), ``g @ w`` (grad_input) and ``addmm(w, g.T, x, beta=0)`` (grad_weight)."""
    if func is aten.mm.default and isinstance(args[1], ComputeWeight):
        a, w = args
        spec = w.specs[0] if w.transposed else w.specs[1]
        return _cast_mm(a, w.hp.t(), spec)
    if func is aten.addmm.default and isinstance(args[2], ComputeWeight) and not kwargs:
        bias, a, w = args  # how a linear layer of `DTensor`s arrives
        return bias + torch.mm(a, w)  # type: ignore[no-any-return]
    if (
        func is aten.addmm.default
        and isinstance(args[0], ComputeWeight)
        and kwargs.get("beta") == 0
    ):
        w, a, b = args
        return _cast_mm(a, b.t(), w.specs[2])
    return on_memory(func, args, kwargs)  # type: ignore[no-any-return]


def _gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Both products of the backward pass, by `aten.linear_backward(x, grad, w, mask)` for matrices."""
    x, grad, w, _ = args
    _, of_input, of_weight = w.specs
    alike = of_input is not None and of_weight is not None and of_input.act == of_weight.act
    grad_MN, grad_NM = _cast_both(grad, of_input.act if alike else None)
    return _cast_mm(grad_MN, w.hp.t(), of_input), _cast_mm(grad_NM, x.t(), of_weight), None


def _cast_both(x: Tensor, spec: Spec | None) -> tuple[Tensor, Tensor]:
    """A matrix and its transpose, both cast as `spec` says, or as they are."""
    if spec is None or is_one_node(x, spec):
        return x, x.t()
    shape = (x.shape[0], x.shape[1])
    call = Call("quantize_both", spec, shape, shape, x.dtype, x.device.type)
    parts, transposed = run(call, x, spec)
    return QTensor(parts, spec, shape, x.dtype), QTensor(transposed, spec, shape[::-1], x.dtype)


#: torch function -> what takes its place where a weight is among the arguments
FUNCTIONS: dict[Any, Callable[..., Any]] = {F.linear: linear}
#: aten overload -> product(func, args, kwargs), below autograd
PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _product,
    aten.addmm.default: _product,
    aten.linear_backward.default: _gradients,
}


def _cast_mm(a_MC: Tensor, b_NC: Tensor, spec: Spec | None) -> Tensor:
    """``a @ b.T`` with both cast as `spec` says."""
    a, b = (gather.upright(x) if isinstance(x, QTensor) else x for x in (dense_memory(a_MC), b_NC))
    if spec is None:
        return torch.mm(a, b.t())
    return cast_product("mm", spec, a, b)


def cast_product(op: str, spec: Spec, a: Tensor, b: Tensor, *others: Any) -> Tensor:
    """The product of plain `a` and `b`, which may be cast already, by the best kernel of `op`."""
    for operand in (a, b):
        if not operand.is_floating_point():
            raise UnsupportedOp(
                f"{op}: an operand of {operand.dtype} with a weight of low-precision products; both must be "
                "floating-point: convert it with .to()"
            )
    call = Call(op, spec, tuple(b.shape), tuple(a.shape), a.dtype, a.device.type)
    return run(call, a, b, *others, spec)  # type: ignore[no-any-return]


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
    if isinstance(first.hp, QTensor) and func not in _KEEPS:
        raise UnsupportedOp(
            f"{func} on a weight that FSDP2 gathered as codes for its products: it would read rounded "
            f"values, e.g. in a lookup tied to it; convert it without {gather.FLOAT8_ALL_GATHER}"
        )
    plain = [leaf.hp if isinstance(leaf, ComputeWeight) else leaf for leaf in leaves]
    plain_args, plain_kwargs = torch.utils._pytree.tree_unflatten(plain, tree)
    out = func(*plain_args, **plain_kwargs)
    turns = _turns(func, args)
    if func in _KEEPS or turns or _is_expert(func, args):
        flag = first.transposed != (turns or func in _TRANSPOSES)
        out = torch.utils._pytree.tree_map_only(Tensor, lambda t: first.like(t, flag), out)
        return return_and_correct_aliasing(func, args, kwargs, out)
    mutates = func._schema.is_mutable and args and isinstance(args[0], ComputeWeight)
    return return_and_correct_aliasing(func, args, kwargs, args[0]) if mutates else out
