"""How kernels of the ops that step rules are tested: against the rules of Adam and Lion in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ao_core import Kernel, OpCall, QTensor, Spec, quantize_tensor
from ao_core.testing import KernelCase, OpTrial
from ao_core.testing.base import gaussian, same_bits
from ao_optim.calls import StepCall, dense_spec
from ao_optim.formats import FORMATS
from ao_optim.programs import Update
from ao_optim.rules import ADAM as ADAM_RULE
from ao_optim.rules import ADAMW

__all__ = ["ADAM", "LION", "RULE"]

#: greatest relative error of rounding to the parameters' dtype
_ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
#: large, so that a step is larger than the rounding of bfloat16
_LR = 0.3
_BETAS = (0.9, 0.99)
_EPS = 1e-8
_OPTIONS = {"lr": _LR, "betas": _BETAS, "weight_decay": 0.1, "maximize": False, "seed": None}
#: of Gaussian numbers, the values of first and second moments
_VALUES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: 0.1 * x,
    lambda x: 0.01 * x.square(),
)

_F32, _BF16 = dense_spec(torch.float32), dense_spec(torch.bfloat16)


def _pairs() -> Iterator[tuple[Spec, Spec]]:
    """Formats of the two moments: dense, those of ao-optim, and one whose squares are in another format."""
    yield _F32, _F32
    yield _BF16, _BF16
    for found in FORMATS.values():
        if isinstance(found.signed, Spec) and isinstance(found.unsigned, Spec):
            yield found.signed, found.unsigned
    float8 = FORMATS["float8"].signed
    assert isinstance(float8, Spec)
    yield float8, replace(float8, dtype="uint8")
    yield float8, _F32


class _Step(OpTrial):
    """A batch is the shapes of the parameters, and what differs of the options."""

    shapes = ((700,),)
    dtypes = (torch.float32, torch.bfloat16)
    #: the options of a step, but for those of a batch
    options: ClassVar[Mapping[str, Any]]
    #: (parameter, gradient, *moments, **options) -> parameter and moments after the step, in float64
    rule: Callable[..., tuple[Tensor, ...]]

    def operands(
        self, kernel: Kernel, shape: tuple[int, ...], specs: Sequence[Any]
    ) -> Sequence[tuple[Spec, ...]]:
        """Formats of the moments of which the first is in the kernel's layout."""
        return [each for each in specs if kernel.layout in ("*", each[0].layout)]

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        shapes, options = batch
        if "seed" in options and case.dtype == torch.float32:
            return None
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        return StepCall(op, case.specs, numel, case.dtype, case.dtype, case.device)

    def odd_calls(self, call: Any) -> Iterator[OpCall]:
        for dtype in (torch.float16, torch.float64):
            yield replace(call, param_dtype=dtype)
            yield replace(call, grad_dtype=dtype)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        shapes, changed = batch
        options = {**self.options, **changed}
        params, grads, *moments = (
            [gaussian(shape, seed=seed + 10 * place + i) for i, shape in enumerate(shapes)]
            for place in range(2 + len(case.specs))
        )
        params, grads = ([x.to(case.device, case.dtype) for x in each] for each in (params, grads))
        stored = [
            [_stored(value(x), spec, case.device) for x in each]
            for each, spec, value in zip(moments, case.specs, _VALUES, strict=False)
        ]
        args = (params, grads, *stored, options)
        yield args, [self.rule(*each, **options) for each in zip(*args[:-1], strict=True)]

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        *lists, options = args
        params, *others = ([x.clone() for x in each] for each in lists)
        fn(params, *others, **options)
        changed = [not same_bits(x, y) for x, y in zip(others[0], lists[1], strict=True)]
        assert not any(changed), "the kernel changed gradients"
        return params, others[1:], lists[0], options

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        params, moments, before, options = actual
        # stochastic rounding is off by up to a whole step, of dense bfloat16 moments too
        steps = 1 if options["seed"] is None else 2
        for param, old, of_moments, (p64, *exact) in zip(
            params, before, zip(*moments, strict=True), expected, strict=True
        ):
            error, change = (param.double() - p64).norm(), (p64 - old.double()).norm()
            assert error <= 1e-5 * change + steps * _ROUNDING[case.dtype] * p64.norm(), (
                f"parameters are off by {error:.1e}"
            )
            for moment, wanted, spec in zip(of_moments, exact, case.specs, strict=True):
                best = (_values(_stored(wanted.float(), spec, case.device)) - wanted).norm()
                error = (_values(moment) - wanted).norm()
                assert error <= 1.01 * steps * best + 1e-5 * wanted.norm(), (
                    f"a moment is off by {error:.1e}"
                )

    def same(self, a: Any, b: Any) -> bool:
        pairs = zip(_leaves([a[0], *a[1]]), _leaves([b[0], *b[1]]), strict=True)
        return all(same_bits(x, y) for x, y in pairs)

    def strided(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        return iter(())  # kernels may expect contiguous tensors


def _stored(value: Tensor, spec: Spec, device: str) -> Tensor:
    dense = {_F32: torch.float32, _BF16: torch.bfloat16}.get(spec)
    if dense is not None:
        return value.to(device, dense)
    return quantize_tensor(value.to(device), spec)


def _values(moment: Tensor) -> Tensor:
    if isinstance(moment, QTensor):
        return moment.dequantize(torch.float32).double()
    return moment.double()


def _leaves(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [
        leaf
        for each in lists
        for x in each
        for leaf in ([part for _, part in x.leaves()] if isinstance(x, QTensor) else [x])
    ]


def _adam(
    param: Tensor, grad: Tensor, m: Tensor, v: Tensor, *, lr: float, betas: tuple[float, float],
    eps: float, weight_decay: float, step: int, decoupled: bool, maximize: bool, seed: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Parameter and moments after the step, in float64.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2.
    """
    p, g = param.double(), -grad.double() if maximize else grad.double()
    if not decoupled:
        g = g + weight_decay * p
    m = betas[0] * _values(m) + (1 - betas[0]) * g
    v = betas[1] * _values(v) + (1 - betas[1]) * g.square()
    unbiased = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    p = p * (1 - lr * weight_decay) if decoupled else p
    return p - lr * unbiased[0] / (unbiased[1].sqrt() + eps), m, v


def _lion(
    param: Tensor, grad: Tensor, m: Tensor, *, lr: float, betas: tuple[float, float], weight_decay: float,
    maximize: bool, seed: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Parameter and moment after the step, in float64.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.
    """
    p, g, old = param.double(), -grad.double() if maximize else grad.double(), _values(m)
    moved = (betas[0] * old + (1 - betas[0]) * g).sign()
    return p * (1 - lr * weight_decay) - lr * moved, betas[1] * old + (1 - betas[1]) * g


class _Adam(_Step):
    specs: Sequence[Any] = tuple(_pairs())
    batches: Sequence[Any] = (
        (((700,),), {"decoupled": True, "step": 1}),
        (((1,), (256,), (257,), (0,), (3, 5, 70)), {"decoupled": False, "step": 7}),
        (((40, 30), (255,)), {"decoupled": True, "maximize": True, "step": 100}),
        (((600,),), {"decoupled": True, "step": 3, "seed": 5}),
    )
    options: ClassVar[Mapping[str, Any]] = {**_OPTIONS, "eps": _EPS}
    rule = staticmethod(_adam)


class _Lion(_Step):
    specs: Sequence[Any] = tuple(dict.fromkeys((first,) for first, _ in _pairs()))
    batches: Sequence[Any] = (
        (((1,), (256,), (257,), (0,), (3, 5, 70)), {}),
        (((40, 30), (255,)), {"maximize": True}),
        (((600,),), {"seed": 5}),
    )
    options = _OPTIONS
    rule = staticmethod(_lion)


def _rank1() -> tuple[Any, ...]:
    """Formats of the moments of a matrix, of which the second has scales of rows and columns."""
    found = FORMATS["rank1_4bit"]
    return found.signed, found.unsigned_matrix


class _AnyRule(_Adam):
    """Both rules of Adam, told as programs."""

    specs: Sequence[Any] = (*_pairs(), _rank1())
    batches: Sequence[Any] = (
        *_Adam.batches,
        (((3, 5, 70), (40, 31), (2, 701)), {"decoupled": False, "step": 7}),
    )

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        by_rows = any(spec.layout == "rank1" for spec in case.specs)
        if by_rows and any(len(shape) < 2 for shape in batch[0]):
            return None
        return super().call(op, case, batch)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        def stepped(
            params: list[Tensor], grads: list[Tensor], *moments: list[Tensor], **options: Any
        ) -> None:
            rule = ADAMW if options["decoupled"] else ADAM_RULE
            told = {name: options[name] for name in rule.defaults}
            update = Update(rule, told, options["step"], options["maximize"])
            fn(params, grads, list(moments), [], update=update, seed=options["seed"])

        return super().run(stepped, args)


#: what `Op.trials` returns
ADAM, LION, RULE = _Adam(), _Lion(), _AnyRule()
