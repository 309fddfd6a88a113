"""Forwards of decoder blocks and MLPs in few ops, which stand on single modules in place of their own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import contains, is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ao_core.ext.kernels import (
    Attention,
    BlockOp,
    CachedBlock,
    Heads,
    KeysAndValues,
    NormBefore,
    Projection,
    cannot_join_rows,
    join_rows,
    pinned_band,
    share_rows,
)
from ao_hf.fusing.structure import AttentionParts, MlpParts, NotFused

__all__ = ["FusedBlock", "FusedMlp", "Head", "Joined", "Tail", "joined", "listens"]

# every module asks for every token
_is_any_autocast_enabled, _is_grad_enabled, _is_compiling = (
    torch._C._is_any_autocast_enabled,
    torch.is_grad_enabled,
    torch.compiler.is_compiling,
)


@dataclass(frozen=True)
class Joined:
    """Linear layers that read the same, as one."""

    linears: tuple[nn.Linear, ...]
    projection: Projection

    def share(self) -> None:
        """Let the layers use the memory of the one."""
        weight, bias = self.projection
        share_rows(weight, [linear.weight for linear in self.linears])  # type: ignore[misc]
        if bias is None:
            return
        begin = 0
        for linear in self.linears:
            linear.bias.data = bias[begin : begin + linear.out_features]
            begin += linear.out_features


def joined(what: str, linears: Sequence[nn.Linear]) -> Joined:
    """One layer with the rows of all, in memory of its own.

    Raises:
        NotFused: their weights cannot be joined.
    """
    weights: Any = [linear.weight for linear in linears]
    biases: Any = [linear.bias for linear in linears]
    if reason := cannot_join_rows(weights):
        raise NotFused(f"{what} are no single matmul: {reason}")
    if len({bias is None for bias in biases}) > 1:
        raise NotFused(f"{what} are no single matmul: some have a bias")
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
    return Joined(tuple(linears), Projection(join_rows(weights), bias))


def _projection(linear: Any) -> Projection | None:
    return None if linear is None else Projection(linear.weight, linear.bias)


@dataclass(frozen=True)
class Head:
    """A block up to attention."""

    norm: nn.Module
    before: NormBefore
    attention: AttentionParts
    inputs: Joined


@dataclass(frozen=True)
class Tail:
    """A block after attention, or an MLP alone, which has no norm."""

    norm: nn.Module | None
    before: NormBefore | None
    mlp: MlpParts
    inputs: Joined


class _Forward:
    """The forward of one module: the fused one where it applies, else that of its class."""

    def __init__(
        self, module: nn.Module, inner: Sequence[nn.Module], linears: Sequence[nn.Linear]
    ) -> None:
        """Note what must stay as it is.

        Args:
            module: whose forward it is.
            inner: modules in it that are not called any more.
            linears: those of them whose weights are used.
        """
        self.module = module
        self._linears = tuple(linears)
        self.inner = tuple(one.__dict__ for one in inner)
        self.hooks = tuple(
            hooks for one in inner for hooks in (one._forward_hooks, one._forward_pre_hooks)
        )
        #: of every module that is not called any more: where its parent keeps it
        self._places: list[tuple[dict[str, Any], str, Any]] = [
            (parent._modules, name, child)
            for parent in module.modules()
            for name, child in parent._modules.items()
            if any(child is one for one in inner)
        ]
        #: of every weight: where its module keeps it, and where it keeps its codes
        self._weights: list[tuple[dict[str, Any], str, Any]] = []
        #: all of both: dictionaries, keys in them, and what must be there
        self._found: tuple[tuple[Any, ...], ...] = ((), (), ())

    def install(self) -> None:
        """Stand in for the module's own forward."""
        for linear in self._linears:
            weight: Any = linear.weight
            name = weight.part_names[0]
            self._weights.append((linear._parameters, "weight", weight))
            self._weights.append((weight.__dict__, name, getattr(weight, name)))
        self._found = tuple(zip(*self._places, *self._weights, strict=True))
        self.module.forward = self

    def remove(self) -> None:
        """Leave the module to its own forward."""
        vars(self.module).pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns."""
        if self.applies() and len(args) < 2:
            found = self.run(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return type(self.module).forward(self.module, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The same in few ops; NotImplemented where it cannot be."""
        raise NotImplementedError

    def checks(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Dictionaries, keys in them, and what must be there while the fused form may run."""
        own = self.module.__dict__
        return [*zip(*self._found, strict=True), (own, "training", False), (own, "forward", self)]

    def applies(self) -> bool:
        """Whether nothing but the results of the module is wanted, and all is as it was found.

        Asked for every module and token, so the loops are in C.
        """
        if _is_compiling() or _is_grad_enabled() or self.module.training:
            return False
        if _is_any_autocast_enabled() or (any(self.hooks) and listens(self.hooks)):
            return False
        if pinned_band() is not None:  # which may have kernels for the parts alone
            return False
        if any(map(contains, self.inner, repeat("forward"))):  # as hooks of accelerate replace it
            return False
        dictionaries, names, expected = self._found
        if all(map(is_, map(dict.get, dictionaries, names), expected)):
            return True
        if not all(found.get(name) is one for found, name, one in self._weights):
            self.remove()
            warnings.warn(
                f"weights of a fused {type(self.module).__name__} were moved or replaced since "
                "ao_hf.fuse(model): it runs as before; call ao_hf.fuse(model) again",
                stacklevel=4,
            )
        return False

    def __reduce__(self) -> Any:
        # a copy has weights of its own, which share nothing: it starts with the forward of its class
        return _own_forward, (self.module,)


def listens(tables: Sequence[dict[int, Any]]) -> bool:
    """Whether a hook wants to know what its module returns.

    Once outputs such as attentions were asked for, transformers leaves hooks on modules for good, which
    do nothing until somebody asks again.
    """
    hooks = [hook for table in tables for hook in table.values()]
    if any(getattr(hook, "__module__", "") != output_capturing.__name__ for hook in hooks):
        return True
    collector = getattr(output_capturing, "_active_collector", None)
    return collector is None or bool(collector.get())


def _own_forward(module: nn.Module) -> Any:
    return MethodType(type(module).forward, module)


class FusedBlock(_Forward):
    """x + attention(norm(x)), and then x + mlp(norm(x))."""

    def __init__(
        self,
        block: nn.Module,
        attention: Any,
        before: nn.Module,
        head: Head | None,
        tail: Tail,
        seen: dict[str, Any],
    ) -> None:
        """Put the parts together.

        Args:
            block: the module.
            attention: its attention module.
            before: the norm before attention.
            head: what becomes the op `qkv`; None: attention is the module's own.
            tail: what becomes the op `mlp`.
            seen: named arguments that the block was given when it was observed.
        """
        output = None if head is None else head.attention.output
        parts = tail.mlp
        linears = [*tail.inputs.linears, parts.down]
        inner = [parts.module, tail.norm, *linears]
        joints = [tail.inputs]
        if head is not None and output is not None:
            linears += [*head.inputs.linears, output]
            inner += [attention, head.norm, *head.inputs.linears, output]
            joints.append(head.inputs)
        super().__init__(block, [one for one in inner if one is not None], linears)
        self._joints, self.attention, self._before, self._head = joints, attention, before, head
        self._tail, self.seen = tail, seen
        self._output, self._down = _projection(output), _projection(parts.down)
        used = (self._output, tail.inputs.projection, self._down)
        weights = tuple(one.weight for one in used if one is not None)
        self._mlp = BlockOp("mlp", weights, parts.activation)
        if head is not None:
            self._qkv = BlockOp("qkv", (head.inputs.projection.weight,))
            self.heads = Heads(*head.attention.heads)
            self.index = attention.layer_idx
            #: what the attention function is told besides what the block is
            self.options = {n: v for n, v in head.attention.kwargs.items() if n not in seen}
        #: the run of blocks that it belongs to, and its place in it
        self.run_of: tuple[Any, int] | None = None

    @property
    def ops(self) -> tuple[str, ...]:
        """What runs as one op each."""
        last = "residual + norm + gate, up and down + residual"
        if self._head is None:
            return (last,)
        return "norm + q, k and v + rotary embedding", f"output projection + {last}"

    def install(self) -> None:
        """Stand in for the module's own forward; weights that are joined share memory from now on."""
        for joint in self._joints:
            joint.share()
        super().install()

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns."""
        if self.run_of is not None and not args and not _is_compiling():
            run, place = self.run_of
            found = run.step(place, x, kwargs)
            if found is not None:
                return found
        return super().__call__(x, *args, **kwargs)

    def run(self, x: Tensor, **kwargs: Any) -> Any:
        """Two ops, with the cache and the attention function of transformers between them."""
        tail = self._tail
        if self._head is None:
            mixed = self.attention(self._before(x), **kwargs)[0]
        else:
            mixed = self._mix(self._head, x, **kwargs)
            if mixed is NotImplemented:
                return NotImplemented
        return self._mlp(
            mixed, x, tail.before, self._output, tail.inputs.projection, self._down,
            tail.mlp.activation,
        )  # fmt: skip

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the block is the module's own but attention without its matmuls."""
        return self._head is not None

    def follows(self, other: FusedBlock) -> bool:
        """Whether it comes after another block, and was given what that one was."""
        if self.index != other.index + 1 or self.seen.keys() != other.seen.keys():
            return False
        return all(map(is_, self.seen.values(), map(other.seen.get, self.seen)))

    def cached(
        self, cache: KeysAndValues, sinks: Tensor | None, attention: Attention
    ) -> CachedBlock:
        """The block with a cache, as the op `decoder` takes it."""
        head, tail = self._head, self._tail
        assert head is not None
        assert self._output is not None
        assert self._down is not None
        return CachedBlock(
            head.before, head.inputs.projection, self.heads, cache, sinks, attention, self._output,
            tail.before, tail.inputs.projection, self._down, tail.mlp.activation,
        )  # fmt: skip

    def _mix(
        self,
        head: Head,
        x: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        attention = self.attention
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, None)
        if attend is None or position_embeddings is None or kwargs.get("output_attentions"):
            return NotImplemented  # the model's own function knows what it returns
        cosine, sine = position_embeddings
        query, key, value = self._qkv(
            x, head.before, head.inputs.projection, cosine, sine, self.heads
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.index)
        mixed, _ = attend(attention, query, key, value, attention_mask, **self.options, **kwargs)
        return mixed.reshape(*x.shape[:-1], -1)


class FusedMlp(_Forward):
    """down(f(gate(x)) * up(x))."""

    def __init__(self, tail: Tail) -> None:
        parts = tail.mlp
        linears = [*tail.inputs.linears, parts.down]
        super().__init__(parts.module, linears, linears)
        self._joint, self._activation = tail.inputs, parts.activation
        self._down = _projection(parts.down)
        weights = (tail.inputs.projection.weight, parts.down.weight)
        self._mlp = BlockOp("mlp", weights, parts.activation)  # type: ignore[arg-type]

    @property
    def ops(self) -> tuple[str, ...]:
        """What runs as one op each."""
        return ("gate, up and down",)

    def install(self) -> None:
        """Stand in for the module's own forward; gate and up share memory from now on."""
        self._joint.share()
        super().install()

    def run(self, x: Tensor, **kwargs: Any) -> Any:
        """One op."""
        return self._mlp(x, None, None, None, self._joint.projection, self._down, self._activation)
