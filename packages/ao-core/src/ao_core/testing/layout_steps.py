"""Part of `LayoutSuite`: input steps beside a layout, which knows nothing of them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from ao_core.steps import hadamard_step, low_rank_step
from ao_core.tensor import QTensor
from ao_core.tensor.saving.leaves import flatten, rebuild
from ao_core.tensor.step_matmuls import without_steps
from ao_core.testing.abilities import can_narrow
from ao_core.testing.base import gaussian
from ao_core.testing.input_steps import every_step, step_matrix
from ao_core.testing.layout_values import same_parts
from ao_core.testing.samples import Sample, activations, quantized

__all__ = ["LayoutSteps"]


class LayoutSteps:
    """Every step in front of a weight in the layout."""

    layout: str

    def test_input_steps_values(self, weight: Sample) -> None:
        """What is stored is W S⁻¹ in the format without steps; what is read and multiplied is W."""
        q, w = _stepped(weight), weight.dense().double()
        matrix, stored = step_matrix(q), without_steps(q, len(q.spec.input))
        direct = quantized((w @ torch.linalg.inv(matrix)).float(), weight.spec)
        assert (stored.spec, stored.part_names) == (direct.spec, direct.part_names)
        # values between two codes may go either way
        near = (
            stored.dequantize() - direct.dequantize()
        ).norm() <= 1e-2 * direct.dequantize().norm()
        assert bool(near), "codes do not follow from the stepped weight"
        logical = stored.dequantize().double() @ matrix
        torch.testing.assert_close(q.dequantize().double(), logical, rtol=1e-4, atol=1e-4)
        x = gaussian((3, w.shape[1]), seed=2)
        expected = F.linear(activations(x, q), q.dequantize().double())
        error = (F.linear(x, q).double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert float(error) <= 2e-2, f"relative error of the matmul {float(error):.1e}"

    def test_input_steps_are_kept(self, weight: Sample) -> None:
        """Layouts, files, copies and rows keep the steps; dense values are written through them."""
        q = _stepped(weight)
        parts, record = flatten("w", q)
        assert record is not None
        for other in q.canonical(), rebuild("w", record, parts.__getitem__), q.clone(), q.t().t():
            assert isinstance(other, QTensor)
            assert other.spec.input == q.spec.input
            assert same_parts(other.canonical(), q.canonical())
        rows = q.shape[0] // 2
        if can_narrow(q, 0, 0, rows):
            assert torch.equal(q[:rows].dequantize(), q.dequantize()[:rows])
        if q.sparsity is None:  # else the sizes of parts may follow from values
            written = q.clone().copy_(weight.dense(1))
            assert isinstance(written, QTensor)
            assert same_parts(written, _stepped(weight, 1)), "written values are not quantized ones"

    def test_low_rank_part(self, weight: Sample) -> None:
        """The rest is stored as without the part, whose product is added, and which goes where codes go."""
        steps = (hadamard_step(1), low_rank_step(3))
        q, w = quantized(weight.dense(), replace(weight.spec, input=steps)), weight.dense()
        added = q.parts["low_rank_b"].float() @ q.parts["low_rank_a"].float()
        rest = quantized(w - added, weight.spec)
        assert same_parts(without_steps(q, 2), rest), "what is stored is not the rest of the weight"
        torch.testing.assert_close(q.dequantize(), rest.dequantize() + added)
        x = gaussian((3, w.shape[1]), seed=2)
        expected = F.linear(x, rest) + F.linear(x, added)
        torch.testing.assert_close(F.linear(x, q), expected, rtol=1e-4, atol=1e-4)
        parts, record = flatten("w", q)
        assert record is not None
        for other in q.canonical(), rebuild("w", record, parts.__getitem__), q.clone(), q.t().t():
            assert isinstance(other, QTensor)
            assert same_parts(other.canonical(), q.canonical())
        rows = q.shape[0] // 2
        if can_narrow(q, 0, 0, rows):
            assert torch.equal(q[:rows].dequantize(), q.dequantize()[:rows])


def _stepped(weight: Sample, seed: int = 0) -> QTensor:
    spec = replace(weight.spec, input=every_step(weight.shape[-1]))
    return quantized(weight.dense(seed), spec)
