"""`KernelSuite`: what a kernel must do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.dispatch import candidates
from ao_core.records import Call, Kernel
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.tensor import fake_quantize, quantize_tensor
from ao_core.testing.base import Suite, available_devices, gaussian, same_bits
from ao_core.testing.samples import SPECS, fitting_specs

__all__ = ["KernelCase", "KernelSuite"]

_ROW = (1, WHOLE)
#: `SPECS`, and formats whose activations are quantized too
KERNEL_SPECS: tuple[Spec, ...] = (
    *SPECS,
    Spec("f8e5m2", _ROW, scale_dtype="bfloat16"),
    Spec("int8", _ROW, act=Spec("int8", _ROW)),
    Spec("int8", _ROW, act=Spec("uint8", _ROW, zero="int")),
    Spec("f8e4m3", _ROW, act=Spec("f8e4m3", _ROW)),
    Spec("f8e4m3", (WHOLE, WHOLE), act=Spec("f8e4m3", (WHOLE, WHOLE))),
    Spec("int4", (1, 32), scale_dtype="bfloat16", act=Spec("uint8", _ROW, zero="int")),
)
#: relative error in norm that rounding in the activations' dtype explains
_RTOL = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class KernelCase:
    """A weight and the dtype of the activations."""

    spec: Spec
    shape: tuple[int, int]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{shape}-{self.spec}-{self.dtype}-{self.device}".replace("torch.", "")


class KernelSuite(Suite):
    """Tests of one kernel, against products of the same values in float64.

    Attributes:
        kernel: its registered name.
        rtol: bound on the relative error in norm; None: by the activations' dtype.
        specs, shapes, dtypes, batches: what to try; the kernel must accept some of it.
    """

    kernel: str
    rtol: float | None = None
    specs: Sequence[Spec] = KERNEL_SPECS
    shapes: Sequence[tuple[int, int]] = ((16, 64), (33, 70))
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)
    batches: Sequence[tuple[int, ...]] = ((0,), (1,), (2,), (17,), (64,), (), (2, 3))

    @property
    def record(self) -> Kernel:
        """The record under test."""
        return registry.kernels.get(self.kernel)

    def cases(self) -> list[KernelCase]:
        """Every spec that fits the kernel's layout, in every shape and dtype."""
        record = self.record
        if record.op == "mm":  # both operands are dense: no layout
            layouts = [registry.layouts.get("plain")]
        elif record.layout == "*":
            layouts = registry.layouts.values()
        else:
            layouts = [registry.layouts.get(record.layout)]
        dtypes = self.dtypes[:1] if record.op == "embedding" else self.dtypes
        devices = available_devices() if record.device == "*" else [record.device]
        return [
            KernelCase(spec, shape, dtype, device)
            for device in devices
            for layout in layouts
            for shape in self.shapes
            for spec in fitting_specs(layout, shape, self.specs)
            for dtype in dtypes
        ]

    def arguments(self) -> dict[str, Sequence[Any]]:
        """`case`: the cases of which the kernel accepts at least one batch."""
        cases = [case for case in self.cases() if self._batches(case)]
        return {"case": cases}

    # -- selection -------------------------------------------------------------------------------

    def test_accepts_something(self) -> None:
        """At least one of the cases is for this kernel."""
        assert self.arguments()["case"], (
            f"kernel {self.kernel!r} accepts none of the cases; set `specs` and `shapes`"
        )

    def test_reasons_are_sentences(self) -> None:
        """`available` and `accepts` answer None or say why not; they raise for no call."""
        answers = {self.record.available()}
        for case in self.cases():
            for batch in self.batches:
                call = self._call(case, batch)
                answers.add(self.record.accepts(call))
                for dtype in (torch.float16, torch.float64):
                    answers.add(self.record.accepts(replace(call, x_dtype=dtype)))
        for answer in answers - {None}:
            assert isinstance(answer, str)
            assert len(answer.split()) >= 3, f"not a sentence: {answer!r}"
            assert "\n" not in answer

    def test_is_a_candidate(self, case: KernelCase) -> None:
        """The table of the layout and device lists it, with its own answer."""
        call = self._call(case, self._batches(case)[0])
        listed = {c.kernel.name: c.refusal for c in candidates(call)}
        assert self.kernel in listed
        if self.record.available() is None:
            assert listed[self.kernel] is None

    # -- results ---------------------------------------------------------------------------------

    def test_against_float64(self, case: KernelCase) -> None:
        """Every batch it accepts, with and without a bias: shape, dtype and a bounded error."""
        bound = _RTOL[case.dtype] if self.rtol is None else self.rtol
        for arguments, expected in self._calls(case):
            before = [a.clone() for a in arguments if type(a) is Tensor]
            actual = self.record.fn(*arguments)
            assert (actual.shape, actual.dtype) == (expected.shape, self._out_dtype(case))
            error = (actual.double() - expected).norm()
            assert float(error) <= bound * float(expected.norm()), (
                f"relative error {float(error / expected.norm()):.2e} > {bound:.0e} "
                f"for {[tuple(a.shape) for a in arguments if isinstance(a, Tensor)]}"
            )
            after = [a for a in arguments if type(a) is Tensor]
            assert all(map(same_bits, after, before)), "the kernel changed its input"

    def test_is_deterministic(self, case: KernelCase) -> None:
        """The same call gives the same bits."""
        for arguments, _ in self._calls(case):
            assert same_bits(self.record.fn(*arguments), self.record.fn(*arguments))

    def test_strided_inputs(self, case: KernelCase) -> None:
        """Activations that are not contiguous give what contiguous ones give."""
        bound = _RTOL[case.dtype] if self.rtol is None else self.rtol
        for arguments, _ in self._calls(case):
            first = arguments[0]
            expected = self.record.fn(*arguments)
            variants = [first.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]]
            if first.dim() == 2:
                variants.append(first.t().contiguous().t())
            for variant in variants:
                actual = self.record.fn(variant, *arguments[1:])
                assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
                error = (actual.double() - expected.double()).norm()
                assert float(error) <= bound * float(expected.double().norm())

    def op_samples(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Custom ops of the kernel, each with arguments, for `torch.library.opcheck`; none by default."""
        return []

    def test_custom_ops(self) -> None:
        """Schema, fake kernel and autograd registration of the ops behind the kernel are right."""
        samples = list(self.op_samples())
        if isinstance(self.record.fn, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            samples.append((self.record.fn, self._some_call()))
        for op, arguments in samples:
            results = torch.library.opcheck(op, arguments)
            assert set(results.values()) == {"SUCCESS"}, results

    # -- how an op is called ---------------------------------------------------------------------

    def _call(self, case: KernelCase, batch: tuple[int, ...]) -> Call:
        n, k = case.shape
        shape = batch if self.record.op == "embedding" else (*batch, k)
        dtype = torch.int64 if self.record.op == "embedding" else case.dtype
        return Call(self.record.op, case.spec, (n, k), shape, dtype, case.device)

    def _batches(self, case: KernelCase) -> list[tuple[int, ...]]:
        """Those that the kernel accepts; products of two matrices take only rows."""
        return [
            batch
            for batch in self.batches
            if (self.record.op != "mm" or len(batch) == 1)
            and (self.record.op != "mm" or case.spec.act is not None)
            and self.record.accepts(self._call(case, batch)) is None
        ]

    def _out_dtype(self, case: KernelCase) -> torch.dtype:
        return torch.float32 if self.record.op == "embedding" else case.dtype

    def _calls(self, case: KernelCase) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        """Arguments of the kernel and the result in float64, for each batch that it accepts."""
        if reason := self.record.available():
            pytest.skip(f"{self.kernel} {reason}")
        n, k = case.shape
        dense = gaussian((n, k), device=case.device)
        w = quantize_tensor(dense, case.spec)
        for seed, batch in enumerate(self._batches(case), start=1):
            if self.record.op == "embedding":
                generator = torch.Generator().manual_seed(seed)
                ids = torch.randint(0, n, batch, generator=generator).to(case.device)
                yield (ids, w), F.embedding(ids, w.dequantize()).double()
                continue
            x = gaussian((*batch, k), seed=seed, device=case.device).to(case.dtype)
            if self.record.op == "mm":
                b = dense.to(case.dtype)
                cast = fake_quantize(b.float(), case.spec)
                yield (x, b, case.spec), _activations(x, case.spec) @ cast.double().t()
                continue
            bias = gaussian((n,), seed=99, device=case.device).to(case.dtype)
            product = F.linear(_activations(x, case.spec), w.dequantize(torch.float32).double())
            yield (x, w, bias), product + bias.double()
            yield (x, w, None), product

    def _some_call(self) -> tuple[Any, ...]:
        return next(self._calls(self.arguments()["case"][0]))[0]


def _activations(x: Tensor, spec: Spec) -> Tensor:
    """The values (float64) that the activations are multiplied as."""
    if spec.act is None:
        return x.double()
    matrix = x.float().reshape(-1, x.shape[-1])
    return fake_quantize(matrix, spec.act).double().reshape(x.shape)
