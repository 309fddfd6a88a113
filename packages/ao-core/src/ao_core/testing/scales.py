"""`ScaleSuite`: what a way to choose scales must do, in any format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ao_core.numerics import choose_qparams, sqnr
from ao_core.records import ScaleMethod
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.tensor import QTensor, quantize_tensor
from ao_core.testing.base import Suite, gaussian, same_bits

__all__ = ["SCALE_SPECS", "ScaleSuite"]

#: every kind of number, storage of scales and zero point, in groups, rows, several rows and whole tensors
SCALE_SPECS: tuple[Spec, ...] = (
    Spec("int4", (1, 32), "bfloat16"),
    Spec("uint4", (1, 32), "float16", zero_point="int"),
    Spec("int3", (1, WHOLE), zero_point="float"),
    Spec("uint5", (1, 16), "float16", zero_point="offset"),
    Spec("int8", (1, WHOLE)),
    Spec("nf4", (1, 64)),
    Spec("f4e2m1", (1, 32), "e8m0"),
    Spec("f8e4m3", (WHOLE, WHOLE)),
    Spec("int6", (4, 8)),
    Spec("int4", (1, 32), Spec("int8", (1, WHOLE))),
)
#: narrow and ragged, wide, a single row, and none
_SHAPES = ((16, 70), (8, 1131), (1, 64), (0, 64))


class ScaleSuite(Suite):
    """Tests of one way to choose scales.

    Attributes:
        scales: its registered name.
        specs: formats to try.
        sqnr_loss: how many dB less than by the largest magnitude ("absmax") the SQNR of Gaussian values in
            at most 6 bits may be. At 8 bits, where all that is clipped counts, three times as many.
    """

    scale_method: str
    specs: Sequence[Spec] = SCALE_SPECS
    sqnr_loss: float = 4.0

    argument_names = ("spec",)

    @property
    def record(self) -> ScaleMethod:
        """The record under test."""
        return registry.scale_methods.get(self.scale_method)

    def arguments(self) -> dict[str, Sequence[Any]]:
        """`spec`: all."""
        return {"spec": self.specs}

    def quantized(self, x: Tensor, spec: Spec) -> QTensor:
        """Values by scales that the method has chosen."""
        return quantize_tensor(x, spec, scale_method=self.scale_method)

    def test_record(self) -> None:
        """It has a summary, which `ao formats` shows, and a function unless the kernels choose."""
        assert isinstance(self.record.summary, str)
        assert self.record.summary, f"scale method {self.scale_method!r}: the summary is empty"
        assert self.record.choose is None or callable(self.record.choose)

    def test_shape_and_storage(self, spec: Spec) -> None:
        """One finite scale for each block, and a zero point where there is one, stored as the spec says."""
        for shape in _SHAPES:
            x = gaussian(shape)
            q, expected = self.quantized(x, spec), quantize_tensor(x, spec)
            for name, part in q.leaves():
                other = dict(expected.leaves())[name]
                found = (tuple(part.shape), part.dtype)
                assert found == (tuple(other.shape), other.dtype), (
                    f"scale method {self.scale_method!r}: {name} of {spec} for {shape} is {found[1]} "
                    f"{found[0]}, expected {other.dtype} {tuple(other.shape)}"
                )
            assert list(q.parts) == list(expected.parts)
            self._check_finite(q, spec, shape)

    def _check_finite(self, q: QTensor, spec: Spec, of: object) -> None:
        values = q.dequantize(torch.float32)
        assert bool(torch.isfinite(values).all()), (
            f"scale method {self.scale_method!r}: {spec} of {of} has "
            f"{int((~values.isfinite()).sum())} NaN or inf"
        )

    def test_quality(self, spec: Spec) -> None:
        """Gaussian values, narrow and wide, with and without an offset: near what absmax gives them."""
        bound = self.sqnr_loss * (3.0 if spec.dtype in ("int8", "f8e4m3") else 1.0)
        offsets = (0.0,) if spec.zero_point == "none" else (0.0, 2.0)
        for shape in _SHAPES[:3]:
            for offset in offsets:
                x = gaussian(shape, seed=3) + offset
                by_absmax = float(sqnr(x, quantize_tensor(x, spec).dequantize()))
                own = float(sqnr(x, self.quantized(x, spec).dequantize()))
                assert own >= by_absmax - bound, (
                    f"scale method {self.scale_method!r}: {own:.1f} dB of {spec} for {shape}, absmax has "
                    f"{by_absmax:.1f}; `sqnr_loss` is {self.sqnr_loss} dB"
                )

    def test_unit_of_the_values(self, spec: Spec) -> None:
        """Values 2**40 times smaller or larger have the SQNR that the same values have."""
        x = gaussian((16, 70), seed=4)
        if spec.scale_dtype not in ("float32", "bfloat16", "e8m0"):
            return  # what the scale cannot hold is not the method's choice
        expected = float(sqnr(x, self.quantized(x, spec).dequantize()))
        for power in (-40, 40):
            values = x * 2.0**power
            own = float(sqnr(values, self.quantized(values, spec).dequantize()))
            assert abs(own - expected) <= 1.0, (
                f"scale method {self.scale_method!r}: {own:.1f} dB of {spec} times 2**{power}, "
                f"{expected:.1f} dB without"
            )

    def test_zeros_and_constants(self, spec: Spec) -> None:
        """Blocks of zeros stay zeros; blocks of one value have a finite scale, and keep its sign."""
        x = torch.zeros(16, 64)
        x[4:8] = 0.75
        x[8:12] = -2.0
        q = self.quantized(x, spec)
        self._check_finite(q, spec, "zeros and constants")
        values = q.dequantize(torch.float32)
        if spec.block != (WHOLE, WHOLE):
            assert not values[:4].any(), (
                f"scale method {self.scale_method!r}: zeros became other values in {spec}"
            )
            assert not values[12:].any(), (
                f"scale method {self.scale_method!r}: zeros became other values in {spec}"
            )
        assert bool((values[4:8] > 0).all())
        assert bool((values[8:12] < 0).all())

    def test_rows_are_independent(self, spec: Spec) -> None:
        """A block's scale does not depend on other blocks: large weights are taken some rows at a time."""
        if isinstance(spec.scale_dtype, Spec):
            return  # its scales share a scale
        x = gaussian((16, 70), seed=5)
        x[8:] *= 1000
        if spec.block[0] == WHOLE:
            return
        whole, half = self.quantized(x, spec), self.quantized(x[:8], spec)
        for name, part in half.leaves():
            assert same_bits(dict(whole.leaves())[name][: len(part)], part), (
                f"scale method {self.scale_method!r}: {name} of {spec} depends on other rows"
            )

    def test_leaves_its_input_alone(self, spec: Spec) -> None:
        """The same values give the same scales, without a gradient, and are not changed."""
        x = gaussian((16, 70), seed=6).requires_grad_(True)
        before = x.detach().clone()
        first, second = self.quantized(x, spec), self.quantized(x, spec)
        assert same_bits(x, before), f"scale method {self.scale_method!r} changes its input"
        for (name, a), (_, b) in zip(first.leaves(), second.leaves(), strict=True):
            assert same_bits(a, b), (
                f"scale method {self.scale_method!r}: {name} differs from call to call"
            )
            assert not a.requires_grad

    def test_bfloat16_and_strides(self, spec: Spec) -> None:
        """Values in bfloat16 and transposed ones give what the same values in float32 give."""
        x = gaussian((16, 70), seed=7).bfloat16()
        expected = self.quantized(x.float(), spec).dequantize(torch.float32)
        for other in (x, x.t().contiguous().t()):
            assert same_bits(self.quantized(other, spec).dequantize(torch.float32), expected)

    def test_function(self, spec: Spec) -> None:
        """Called as `quantize_tensor` calls it: what `choose_qparams` returns in shape and storage."""
        choose = self.record.choose
        if choose is None:
            return
        fmt, x = registry.dtypes.get(spec.dtype), gaussian((16, 70), seed=8)
        storage = spec.scale_dtype if isinstance(spec.scale_dtype, str) else "float32"
        expected = choose_qparams(x, fmt, spec.block, spec.zero_point, storage)
        for name, own, other in zip(
            ("scale", "zero_point"), choose(x, fmt, spec), expected, strict=True
        ):
            assert (own is None) == (other is None), f"{spec}: its {name} is {own!r}"
            if own is not None and other is not None:
                assert (own.shape, own.dtype) == (other.shape, other.dtype), (
                    f"scale method {self.scale_method!r}: {name} of {spec} is {own.dtype} "
                    f"{tuple(own.shape)}, expected {other.dtype} {tuple(other.shape)}"
                )
                assert bool(torch.isfinite(own.float()).all())
