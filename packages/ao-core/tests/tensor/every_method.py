"""Calls methods of `torch.Tensor` on tensors of ao and on dense ones, and prints how they compare.

A program of its own, since a method that asks a tensor for memory that it does not have may end the
process: before each call, a line says which one it is.

    python every_method.py KIND
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ao_core import WHOLE, ComputeWeight, QTensor, Spec, quantize_tensor

ROW = Spec("int8", (1, WHOLE))
SHAPE = (6, 6)


def _values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).abs() / 4 + 0.05


@lru_cache
def _quantized(seed: int) -> QTensor:
    return quantize_tensor(_values(seed, *SHAPE), ROW)


@lru_cache
def _cast(seed: int) -> ComputeWeight:
    spec = Spec("int8", (1, WHOLE), act=ROW)
    return ComputeWeight(_values(seed, *SHAPE), spec, spec, spec)


def dense_of(value: Any) -> Any:
    """The dense tensor that a tensor of ao stands for."""
    if isinstance(value, QTensor):
        return value.dequantize()
    return value.memory.detach().clone() if isinstance(value, ComputeWeight) else value


class Ours:
    """In the table of arguments: a tensor of ao."""


class Like:
    """In the table of arguments: a dense tensor of the same shape."""


_ROWS = torch.tensor([4, 1])
_GRID = torch.arange(36).reshape(6, 6) % 6
_MASK = _GRID > 2

#: arguments that are tried on every method, where the dense tensor takes them
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (),
    (0,),
    (1,),
    (2,),
    (-1,),
    (0.5,),
    (None,),
    (False,),
    (0, 1),
    (1, 0),
    (0, 1, 4),
    (0, 2, 3),
    (0.1, 0.2),
    ((1, 0),),
    (SHAPE,),
    (*SHAPE,),
    ((36,),),
    (2, 3, 6),
    (0, (2, 3)),
    (Ours,),
    (Like,),
    (Ours, Ours),
    (Like, Ours),
    (Ours, 0.5),
    (_MASK,),
    (_MASK, 0.5),
    (_MASK, Like),
    (Ours, _MASK),
    (_ROWS,),
    (0, _ROWS),
    (0, _ROWS, 0.5),
    (0, _ROWS, _values(7, 2, 6)),
    (0, _GRID),
    (0, _GRID, Like),
    (0, _GRID, 0.5),
    (0, _GRID, Like, "sum"),
    ((_ROWS,), _values(8, 2, 6)),
    (_values(9, 6),),
    (_values(9, 6), _values(10, 6)),
    (1, 0, 0.5),
    (2, 0, 0.5),
    (6, 3),
    (torch.float64,),
    (torch.bfloat16,),
    (torch.int64,),
    ("cpu",),
    ("ij,jk->ik", Ours),
    (torch.Tensor,),
    (abs,),
    (Ours, max),
    (Ours, Ours, lambda a, b, c: a),
    ("weight",),
    (0.5, 0, 1.0),
)


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


#: what is said about an object, its class or its address, or drawn: it works, and is not compared
UNLIKE = _set(
    """bernoulli bernoulli_ cauchy_ data_ptr const_data_ptr exponential_ geometric_ log_normal_ multinomial
    normal_ random_ uniform_ new_empty empty_like new_empty_strided backward register_hook
    register_post_accumulate_grad_hook storage untyped_storage type grad_fn name __annotations__ __dict__
    __dir__ __doc__ __dlpack__ __format__ __getstate__ __hash__ __module__ __reduce__ __reduce_ex__ __repr__
    __sizeof__ __str__ __weakref__"""
)
#: about classes and not tensors, or a method of their own; two of sizes that FSDP2 asks for
SKIPPED = _set(
    """__class__ __getattribute__ __init__ __init_subclass__ __new__ __setattr__ __delattr__ __deepcopy__
    __subclasshook__ __torch_dispatch__ __torch_function__ dequantize new new_zeros"""
)
#: matmuls of a `ComputeWeight` are those of its casts
_MATMULS = _set("addmm inner matmul matrix_power mm __matmul__ __rmatmul__")
#: they write, though no underscore says so
_WRITES = frozenset(("module_load", "matrix_power", "__setitem__"))


def _filled(arguments: Sequence[Any], make: Callable[[int], Tensor]) -> tuple[Any, ...]:
    out = []
    for place, argument in enumerate(arguments):
        if argument is Ours:
            argument = make(20 + place).clone()
        elif argument is Like:
            argument = _values(20 + place, *SHAPE)
        out.append(argument)
    return tuple(out)


def names() -> list[str]:
    """The methods and attributes of tensors that programs use."""
    private = [n for n in dir(torch.Tensor) if n.startswith("_") and not n.startswith("__")]
    return sorted(set(dir(torch.Tensor)) - set(private) - SKIPPED)


def _calls(name: str) -> Iterator[tuple[Any, ...]]:
    attribute = getattr(torch.Tensor, name)
    if callable(attribute):
        yield from ARGUMENTS
    else:
        yield ()


def _call(target: Tensor, name: str, arguments: tuple[Any, ...]) -> Any:
    attribute = getattr(target, name)
    return attribute(*arguments) if callable(attribute) else attribute


def _bound(kind: str, name: str) -> float:
    """How far values may be off, against the greatest: what is written is rounded to the format again."""
    written = name in _WRITES or (not name.startswith("__") and name.endswith("_"))
    if written or name.startswith("__i") or ("compute" in kind and name in _MATMULS):
        return 0.02
    return 1e-5


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


def difference(actual: Any, expected: Any, bound: float) -> str:
    """How two results differ, or nothing."""
    if hasattr(actual, "__next__"):
        actual, expected = list(actual), list(expected)
    ours, theirs = tree_leaves(actual), tree_leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} results in place of {len(theirs)}"
    return next(
        filter(None, (_differs(a, b, bound) for a, b in zip(ours, theirs, strict=True))), ""
    )


def _differs(a: Any, b: Any, bound: float) -> str:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        same = (type(a), repr(a)) == (type(b), repr(b))
        return "" if same else f"{a!r}, not {b!r}"
    if _kind(a) != _kind(b):
        return f"{_kind(a)}, not {_kind(b)}"
    a, b = (dense_of(t).detach().to_dense().to(torch.complex128) for t in (a, b))
    if not b.isfinite().all():  # in a quantized tensor NaN spreads over its block
        return (
            "" if bound > 1e-3 or torch.allclose(a, b, bound, bound, equal_nan=True) else "values"
        )
    if not a.numel():
        return ""
    off = (a - b).abs().max()
    return f"values off by {off}" if off > bound * max(b.abs().max(), 1e-3) else ""


def compare(kind: str, name: str, arguments: tuple[Any, ...]) -> tuple[str, str]:
    """What a call came to: same, wrong, refused, unlike; both or taken where the dense one is refused."""
    make = _quantized if "quantized" in kind else _cast
    reverse = kind.startswith("dense")
    mine = _filled(arguments, make)
    target = _values(1, *SHAPE) if reverse else make(1).clone()
    dense, dense_target = tree_map(dense_of, mine), dense_of(target).clone()
    try:
        expected = _call(dense_target, name, dense)
    except Exception:
        failed = True
    else:
        failed = False
    try:
        actual = _call(target, name, mine)
    except Exception as error:
        return ("both" if failed else "refused"), f"{type(error).__name__}: {error}"
    if failed:
        return "taken", f"{actual!r}"[:100]
    if name in UNLIKE:
        return "unlike", ""
    bound = _bound(kind, name)
    for what, ours, theirs in (
        ("result", actual, expected),
        ("tensor", target, dense_target),
        ("arguments", mine, dense),
    ):
        if why := difference(ours, theirs, bound):
            return "wrong", f"{what}: {why}"
    return "same", ""


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """A line before each call, and one for what it came to."""
    warnings.simplefilter("ignore")
    kind = sys.argv[1]
    shown = {id(arguments): f"{arguments}".replace("\n", " ") for arguments in ((), *ARGUMENTS)}
    for name in names():
        for arguments in _calls(name):
            if kind.startswith("dense") and Ours not in arguments:
                continue
            _say(f"{name}{shown[id(arguments)]}")
            _say(json.dumps(compare(kind, name, arguments)))


if __name__ == "__main__":
    main()
