"""How `KernelSuite` tests an op: which calls it tries, with which arguments, and what must come out.

An op brings its `OpTrial` in `Op.trials`. Its defaults are for a matmul with one quantized weight (N, K).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ao_core.layouts import Layout
from ao_core.records import Call, Kernel, OpCall
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.testing.base import same_bits
from ao_core.testing.samples import SPECS, holds

__all__ = ["KERNEL_SPECS", "KernelCase", "OpTrial", "strided_variants"]

_ROW, _TENSOR = (1, WHOLE), (WHOLE, WHOLE)
#: `SPECS`, zero points of values, and formats whose activations are quantized too
KERNEL_SPECS: tuple[Spec, ...] = (
    *SPECS,
    Spec("uint4", (1, 16), scale_dtype="float16", zero_point="offset"),
    Spec("int8", _ROW, scale_dtype="bfloat16"),
    Spec("f8e5m2", _ROW, scale_dtype="bfloat16"),
    Spec("int8", _ROW, act=Spec("int8", _ROW)),
    Spec("int8", _ROW, act=Spec("uint8", _ROW, zero_point="int")),
    Spec("f8e4m3", _ROW, act=Spec("f8e4m3", _ROW)),
    Spec("f8e4m3", (WHOLE, WHOLE), act=Spec("f8e4m3", (WHOLE, WHOLE))),
    Spec("int4", (1, 32), scale_dtype="bfloat16", act=Spec("uint8", _ROW, zero_point="int")),
    Spec("int8", _ROW, act=Spec("int8", _TENSOR, static=True)),
    Spec("int8", _ROW, act=Spec("uint8", _TENSOR, zero_point="int", static=True)),
    Spec("f8e4m3", _ROW, act=Spec("f8e4m3", _TENSOR, static=True)),
    Spec("f8e4m3", _TENSOR, act=Spec("f8e5m2", _TENSOR, static=True)),
    Spec(
        "int8", _ROW, act=Spec("f4e2m1", (1, 16), scale_dtype=Spec("f8e4m3", _TENSOR, static=True))
    ),
)


@dataclass(frozen=True)
class KernelCase:
    """What stays the same in several calls of an op."""

    #: formats of the quantized operands; none where all are dense
    specs: tuple[Spec, ...]
    #: of the operand that matters most, such as the weight
    shape: tuple[int, ...]
    #: of the dense operands
    dtype: torch.dtype
    device: str

    @property
    def spec(self) -> Spec:
        """The format of the first quantized operand."""
        return self.specs[0]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        formats = "".join(f"-{spec}" for spec in self.specs)
        return f"{shape}{formats}-{self.dtype}-{self.device}".replace("torch.", "")


class OpTrial:
    """How an op is tried: subclass it, and return an instance from `Op.trials`.

    `samples` must be written; `call` too where the call type is not `Call`, `operands` where not exactly one
    operand is quantized, `run` where the op writes in place, and `check` where a bound on the relative error
    in norm is not what the op promises.

    Attributes:
        specs, shapes, dtypes, batches: defaults of the attributes of `KernelSuite`, which says what they are.
    """

    specs: Sequence[Spec] = KERNEL_SPECS
    shapes: Sequence[tuple[int, ...]] = ((16, 64), (33, 330))
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
    #: what differs between the calls of one case; of each rank some of few rows, which is all that some take
    batches: Sequence[Any] = (
        *((m,) for m in (0, 1, 2, 3, 5, 17, 64)),
        *((), (1, 3), (2, 3), (1, 1, 2), (2, 3, 5)),
    )

    def layouts(self, kernel: Kernel) -> Sequence[Layout]:
        """Those of the tensors that a kernel is tried with: its own, or all where it names none."""
        if kernel.layout == "*":
            return registry.layouts.values()
        return [registry.layouts.get(kernel.layout)]

    def cases(
        self,
        kernel: Kernel,
        devices: Sequence[str],
        specs: Sequence[Spec],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
    ) -> list[KernelCase]:
        """All cases to try a kernel with, which may refuse some of them."""
        return [
            KernelCase(formats, shape, dtype, device)
            for device in devices
            for shape in shapes
            for formats in self.operands(kernel, shape, specs)
            for dtype in dtypes
        ]

    def operands(
        self, kernel: Kernel, shape: tuple[int, ...], specs: Sequence[Any]
    ) -> Sequence[tuple[Spec, ...]]:
        """The formats of the quantized operands together, one tuple for each case of a shape.

        Here of one operand: each of `specs` that fits, in each layout. Where an op has several, or none,
        `specs` may hold what the op likes.
        """
        layouts = self.layouts(kernel)
        return [(spec,) for each in layouts for spec in self.fitting(each, shape, specs)]

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        """The specs that the op is tried with for a tensor of this shape in a layout."""
        found = {
            (spec.dtype, spec.scale_dtype, spec.zero_point, spec.act): replace(
                spec, layout=layout.name
            )
            for spec in reversed(specs)
            if holds(layout, shape, spec)
        }
        return list(reversed(found.values()))

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        """What the kernel is asked to accept; None where the op has no such call."""
        x_shape = (*batch, case.shape[-1])
        return Call(op, case.spec, case.shape, x_shape, case.dtype, case.device)

    def odd_calls(self, call: OpCall) -> Iterator[OpCall]:
        """Calls like this one that kernels may refuse, but must answer: here of other dtypes."""
        if isinstance(call, Call):
            for dtype in (torch.float16, torch.float64):
                yield replace(call, x_dtype=dtype)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Arguments of the kernel, and the result to compare with, computed in another way."""
        raise NotImplementedError

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What a kernel makes of the arguments of `samples`.

        For an op that writes in place: call it with copies of what it writes, and return them.
        """
        return fn(*args)

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        """Assert that a result has the right shape, dtype and NaN, is contiguous, and near enough in norm."""
        shape, dtype = tuple(actual.shape), actual.dtype
        assert (shape, dtype) == (tuple(expected.shape), self.out_dtype(case)), (
            f"the result is {dtype} {shape}, expected {self.out_dtype(case)} {tuple(expected.shape)}"
        )
        assert actual.is_contiguous(), f"the result {shape} has strides {actual.stride()}"
        actual, expected = actual.double(), expected.double()
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan), (
            f"the result {shape} has {int(actual.isnan().sum())} NaN, the matmul has {int(nan.sum())}"
        )
        error = (actual - expected).masked_fill(nan, 0.0).norm()
        norm = expected.masked_fill(nan, 0.0).norm()
        assert float(error) <= bound * float(norm), (
            f"relative error {float(error / norm):.2e} > {bound:.0e}, result {shape}"
        )

    def same(self, a: Any, b: Any) -> bool:
        """Whether two results, tensors or tuples of them, have the same bits."""
        pairs = zip(a, b, strict=True) if isinstance(a, tuple) else ((a, b),)
        return all(same_bits(one, other) for one, other in pairs)

    def out_dtype(self, case: KernelCase) -> torch.dtype:
        """Of the result."""
        return case.dtype

    def strided(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """The same arguments with dense ones that are not contiguous."""
        for variant in strided_variants(args[0]):
            yield (variant, *args[1:])


def strided_variants(x: Tensor) -> Iterator[Tensor]:
    """The values of a plain tensor in memory that is not contiguous."""
    yield x.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]
    if x.dim():
        # rows of a wider matrix; a single one even counts as contiguous, whatever its stride says
        yield torch.cat([x, x[..., :6]], -1)[..., : x.shape[-1]]
    if x.dim() == 2:
        yield x.t().contiguous().t()
