"""`DTypeSuite`: what a number format must do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ao_core.dispatch import candidates
from ao_core.numerics import quant_max_of, sqnr
from ao_core.records import Call, DType
from ao_core.registry import registry
from ao_core.spec import NO_SCALE, Spec
from ao_core.tensor import quantize_tensor, to_layout
from ao_core.testing import oracles
from ao_core.testing.base import Suite, available_devices, gaussian, same_bits
from ao_core.testing.samples import holds

__all__ = ["DTypeSuite"]


class DTypeSuite(Suite):
    """Tests of one number format.

    Attributes:
        dtype: its registered name.
        sqnr_margin: how far, in dB, `quantize_tensor` on Gaussian data may be from brute force.
    """

    dtype: str
    sqnr_margin = 0.05

    @property
    def format(self) -> DType:
        """The record under test."""
        return registry.dtypes.get(self.dtype)

    def arguments(self) -> dict[str, Sequence[Any]]:
        """Every test that takes `device` runs on all devices of this machine."""
        return {"device": available_devices()}

    # -- the record ------------------------------------------------------------------------------

    def test_record_is_consistent(self) -> None:
        """`bits`, `min`, `max`, `quant_max`, `kind` and `storage` describe what `decode` does."""
        fmt = self.format
        values = oracles.decoded(fmt)
        finite = values[torch.isfinite(values)]
        assert fmt.kind != "codebook", "values that are learned are not known to the format"
        assert 1 <= fmt.bits <= (32 if fmt.kind == "dense" else 8)
        ends = fmt.decode(fmt.encode(torch.tensor([-math.inf, math.inf]))).tolist()
        assert ends == [fmt.min, fmt.max]
        assert fmt.min <= float(finite.min()) < float(finite.max()) <= fmt.max
        assert 0 < fmt.quant_max <= max(abs(fmt.min), abs(fmt.max))
        assert 8 * fmt.storage.itemsize == max(fmt.bits, 8)
        assert fmt.code_dtype.itemsize == fmt.storage.itemsize
        assert fmt.summary, "summary is empty: `ao formats` shows it"

    def test_values_in_order(self) -> None:
        """Integers increase as two's complement, or unsigned, does; `encode` never decreases."""
        fmt = self.format
        values = oracles.decoded(fmt)
        if fmt.kind == "int":
            by_code = values[oracles.integer_order(fmt)]
            assert bool((by_code[1:] >= by_code[:-1]).all()), (
                f"{self.dtype}: values decrease along the codes; those of kind 'int' are integers in two's "
                "complement, or unsigned ones: 'float' and 'lut' are for codes in any order"
            )
        assert len(values[torch.isfinite(values)].unique()) > 1, (
            "a format needs at least two values"
        )
        x = oracles.probes(fmt).sort().values
        rounded = fmt.decode(fmt.encode(x))
        assert bool((rounded[1:] >= rounded[:-1]).all()), (
            "a greater value got a lesser code's value"
        )

    # -- codes -----------------------------------------------------------------------------------

    def test_decode_then_encode_keeps_every_value(self, device: str) -> None:
        """Each value encodes to itself, and to its own code where no other code has the value."""
        fmt = self.format
        codes = oracles.all_codes(fmt, device)
        values = fmt.decode(codes)
        again = fmt.encode(values)
        finite = torch.isfinite(values)
        assert same_bits(fmt.decode(again)[finite], values[finite])
        _, which, count = values.view(torch.int32).unique(return_inverse=True, return_counts=True)
        alone = count[which] == 1
        assert torch.equal(again[finite & alone], codes[finite & alone])

    def test_decodes_as_others_do(self) -> None:
        """Every code has the value that ml_dtypes, gfloat or the definition gives it."""
        expected = torch.tensor(oracles.foreign_table(self.format), dtype=torch.float64)
        actual = oracles.decoded(self.format)
        nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(actual), nan)
        assert torch.equal(actual[~nan], expected[~nan])
        assert torch.equal(torch.signbit(actual[~nan]), torch.signbit(expected[~nan]))

    # -- rounding --------------------------------------------------------------------------------

    def test_rounds_to_nearest(self, device: str) -> None:
        """At all values, midpoints and the float32 numbers next to them: nearest, ties as the kind says."""
        self._check_nearest(oracles.probes(self.format), device)

    def test_rounds_every_bfloat16(self, device: str) -> None:
        """All finite bfloat16 numbers, which are exact in float32, and 10,000 float32 ones."""
        every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
        self._check_nearest(every[torch.isfinite(every)], device)
        self._check_nearest(gaussian((10_000,)) * self.format.quant_max / 2, device)

    def _check_nearest(self, x: Tensor, device: str) -> None:
        fmt = self.format
        codes = fmt.encode(x.to(device)).cpu()
        expected = oracles.nearest(fmt, x)
        actual = fmt.decode(codes).to(torch.float64)
        wrong = actual != expected
        assert not wrong.any(), (
            f"{self.dtype}: {float(x[wrong][0])!r} became {float(actual[wrong][0])!r}, nearest is "
            f"{float(expected[wrong][0])!r} ({int(wrong.sum())} of {len(x)} inputs are wrong); ties go to "
            "the even integer (kind 'int'), the even code ('float') or the lower value ('lut')"
        )

    def test_saturates(self, device: str) -> None:
        """Everything beyond the range, infinities too, becomes the nearer end of it."""
        fmt = self.format
        far = torch.tensor([torch.finfo(torch.float32).max, math.inf], device=device)
        assert fmt.decode(fmt.encode(far)).tolist() == [fmt.max] * 2
        assert fmt.decode(fmt.encode(-far)).tolist() == [fmt.min] * 2

    def test_nan(self, device: str) -> None:
        """NaN stays NaN where the format has one, is a finite value else, and harms no neighbour."""
        fmt = self.format
        x = torch.tensor([fmt.max, math.nan, fmt.min], device=device)
        out = fmt.decode(fmt.encode(x))
        has_nan = bool(torch.isnan(oracles.decoded(fmt)).any())
        assert bool(torch.isnan(out[1])) == has_nan
        assert bool(torch.isfinite(out[1])) == (not has_nan)
        assert out[0] == fmt.max
        assert out[2] == fmt.min

    def test_negative_zero(self, device: str) -> None:
        """-0.0 keeps its sign where the format has a negative zero, and is as 0.0 else."""
        fmt = self.format
        zeros = fmt.decode(fmt.encode(torch.tensor([0.0, -0.0], device=device)))
        values = oracles.decoded(fmt)
        has_negative_zero = bool(((values == 0) & torch.signbit(values)).any())
        assert zeros[0] == zeros[1]
        assert torch.signbit(zeros).tolist()[1] == (has_negative_zero or zeros[1].item() < 0)

    def test_says_whether_it_has_a_zero(self) -> None:
        """`has_zero` tells whether some code stands for 0."""
        assert self.format.has_zero == bool((oracles.decoded(self.format) == 0).any())

    # -- tensors ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 4)])
    def test_shapes(self, shape: tuple[int, ...], device: str) -> None:
        """Any shape: codes have `code_dtype`, below `codes`, values float32; inputs are left alone."""
        fmt = self.format
        x = gaussian(shape, device=device)
        # what a careless encode clears in place: NaN, infinities, and values out of range
        strange = torch.tensor(
            [math.nan, math.inf, -math.inf, 3e38, -3e38, -0.0, 1e-45], device=device
        )
        flat = x.view(-1)
        flat[::2] = strange.repeat(len(flat))[: len(flat[::2])]
        before = x.clone()
        codes = fmt.encode(x)
        assert (codes.shape, codes.dtype, codes.device) == (x.shape, fmt.code_dtype, x.device)
        assert fmt.kind == "dense" or bool((codes.int() < fmt.codes).all())
        kept = codes.clone()
        values = fmt.decode(codes)
        assert (values.shape, values.dtype, values.device) == (x.shape, torch.float32, x.device)
        assert same_bits(x, before), "encode changed its input"
        assert same_bits(codes, kept), "decode changed its input"

    def test_strided_and_wider_inputs(self, device: str) -> None:
        """Transposed, sliced and float64 inputs give the codes of contiguous float32 ones."""
        fmt = self.format
        x = gaussian((6, 10), device=device) * fmt.quant_max
        codes = fmt.encode(x)
        assert torch.equal(fmt.encode(x.t()), codes.t())
        assert torch.equal(fmt.encode(x[::2, 1::3]), codes[::2, 1::3])
        assert torch.equal(fmt.encode(x.double()), codes)
        assert same_bits(fmt.decode(codes.t()).contiguous(), fmt.decode(codes).t().contiguous())

    # -- matmuls --------------------------------------------------------------------------------

    def test_matmuls(self, device: str) -> None:
        """Every kernel that takes the format, in every layout, on a width that is not a multiple of anything.

        Kernels pad what they read, also where code 0 is not a number.
        """
        fmt, shape = self.format, (33, 70)
        scale = NO_SCALE if fmt.kind == "dense" else "float32"
        w, x = gaussian(shape, device=device), gaussian((17, 70), device=device)
        w = w.abs() if fmt.min >= 0 else w
        for layout in registry.layouts.values():
            spec = Spec(self.dtype, (1, 32), scale, layout=layout.name)
            runs = not layout.conversion_devices or device in layout.conversion_devices
            if not runs or not holds(layout, shape, spec):
                continue
            canonical = spec.in_layout(layout.canonical_of(spec, fmt))
            q = to_layout(quantize_tensor(w, canonical), layout.name)
            values = q.dequantize(torch.float32).double()
            for rows in (1, 3, 17):
                expected = x[:rows].double() @ values.t()
                call = Call("linear", spec, shape, (rows, 70), torch.float32, device)
                for kernel in (c.kernel for c in candidates(call) if c.refusal is None):
                    out = kernel.fn(x[:rows], q, None).double()
                    error = float((out - expected).norm() / expected.norm())
                    assert error <= 1e-5, (
                        f"{kernel.name} on {spec}, {rows} rows: off by {error:.2g}"
                    )

    # -- tracing ---------------------------------------------------------------------------------

    def test_fake_and_meta_tensors(self) -> None:
        """Shapes and dtypes are known without values: what tracing and meta models need."""
        fmt = self.format
        with FakeTensorMode():
            values = fmt.decode(fmt.encode(torch.empty(3, 5)))
        assert (tuple(values.shape), values.dtype) == ((3, 5), torch.float32)
        values = fmt.decode(fmt.encode(torch.empty(3, 5, device="meta")))
        assert (tuple(values.shape), values.device.type) == ((3, 5), "meta")

    def test_compiles(self) -> None:
        """torch.compile traces encode and decode without a break, and changes no bit."""
        fmt = self.format
        x = gaussian((4, 16)) * fmt.quant_max

        def there_and_back(x: Tensor) -> tuple[Tensor, Tensor]:
            codes = fmt.encode(x)
            return codes, fmt.decode(codes)

        torch._dynamo.reset()
        compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
        for actual, expected in zip(compiled(x), there_and_back(x), strict=True):
            assert same_bits(actual, expected)

    # -- quality ---------------------------------------------------------------------------------

    def test_quality_on_gaussian_data(self, device: str) -> None:
        """SQNR in groups of 128: that of brute force, above a floor, below Shannon's limit.

        A format of 32 bits loses nothing.
        """
        fmt = self.format
        x = gaussian((64, 1024), device=device)
        zero_point = "int" if fmt.kind == "int" and fmt.min >= 0 else "none"
        # values without a sign and without a zero point are for data without a sign
        signless = fmt.min >= 0 and zero_point == "none"
        x = x.abs() if signless else x
        scale = NO_SCALE if fmt.kind == "dense" else "float32"
        again = quantize_tensor(
            x, Spec(self.dtype, (1, 128), scale, zero_point=zero_point)
        ).dequantize()
        if fmt.bits == 32:
            assert same_bits(again, x)
            return
        actual = float(sqnr(x, again))
        assert abs(actual - self._brute_sqnr(x.cpu(), zero_point == "int")) <= self.sqnr_margin
        # At R bits per value a Gaussian cannot be known better than 6.02 R dB; here R includes a
        # float32 scale, if any, (and a zero point) in every group, and the sign where that is known.
        rate = fmt.bits + (40 if zero_point == "int" else 32) / 128 + signless
        values = oracles.decoded(fmt)
        levels = len(values[torch.isfinite(values)].unique())
        assert 2.5 * math.log2(levels) - 2.5 <= actual <= 20 * math.log10(2) * rate

    def _brute_sqnr(self, x: Tensor, unsigned: bool) -> float:
        """SQNR of the nearest value in float64, with scales of full precision."""
        fmt = self.format
        groups = x.double().reshape(-1, 128)
        zero_point = torch.zeros(len(groups), 1, dtype=torch.float64)
        if unsigned:
            low = groups.amin(1, keepdim=True).clamp(max=0)
            high = groups.amax(1, keepdim=True).clamp(min=0)
            scale = (high - low) / (fmt.max - fmt.min)
            zero_point = (fmt.min - low / scale).round()
        elif fmt.kind == "dense":
            scale = torch.ones(len(groups), 1, dtype=torch.float64)
        else:
            scale = groups.abs().amax(1, keepdim=True) / quant_max_of(fmt, (1, 128))
        ratio = groups / scale + zero_point
        approx = (oracles.nearest(fmt, ratio.reshape(-1)).reshape(ratio.shape) - zero_point) * scale
        noise = (groups - approx).square().sum()
        return float(10 * torch.log10(groups.square().sum() / noise))
