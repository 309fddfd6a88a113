"""Weights on a trellis: the suites, calibration, files, and what the format refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ao_core import QTensor, Spec, kernels, load_model, quantize_, quantize_tensor, save_model
from ao_core.ext import QuantizationError, UnsupportedOp
from ao_core.ext.numerics import hadamard_matrix, sqnr
from ao_core.ext.quantizing import grid_of, regridded, stepped_problem
from ao_core.testing import AlgorithmSuite, LayoutSuite, TransformSuite
from ao_core.testing.samples import Sample
from ao_core.testing.transforms import SUBJECTS
from ao_quant import GPTQConfig, TrellisWeightOnlyConfig
from ao_quant.algorithms.gptq import gptq
from ao_quant.algorithms.hessian import damped_factor
from ao_quant.algorithms.records import ALGORITHMS
from ao_quant.trellis.layout import TRELLIS


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


#: the others are the same weights in other places, or filters, which are skipped
KINDS = ("odd_linear", "embedding", "experts", "conv1d")


class TestLayout(LayoutSuite):
    layout = "trellis"
    specs = TRELLIS.examples
    shapes = ((16, 8), (130, 6), (1, 1), (0, 8), (3, 8, 6))

    def test_every_width_of_code(self):
        """There are three widths, and columns are apart: no row is too wide for others."""
        for spec in TRELLIS.examples:
            self._check_packing(Sample(spec, (5, 21)))


class TestTransform(TransformSuite):
    config = TrellisWeightOnlyConfig(3)
    sqnr_range = (8.0, 40.0)
    subjects = tuple(subject for subject in SUBJECTS if subject.name in KINDS)


class TestCalibrated(AlgorithmSuite):
    record = next(each for each in ALGORITHMS if each.config_type is GPTQConfig)
    config = GPTQConfig(TrellisWeightOnlyConfig(2))
    error_range = (0.05, 1.0)


@pytest.mark.parametrize("shape", [(100, 96), (576, 40), (192, 36)])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_is_that_of_the_trellis_in_any_size(bits, shape):
    """At 2 bits 11.5 dB, where 4 values of their own have 9.3; nothing is lost where rings are not full."""
    w = normal(*shape)
    q = quantize_tensor(w, TrellisWeightOnlyConfig(bits).spec(shape, w.dtype))
    least = {2: 11.2, 3: 17.1, 4: 22.6}[bits]
    assert least < float(sqnr(w, q.dequantize())) < 6.03 * bits + (2 if shape[0] == 100 else 0.2)
    assert q.stored_bytes == -(-shape[0] // 128) * 16 * bits * shape[1] + 2 * shape[0]


def test_a_rotation_helps_weights_that_are_not_normal():
    w = torch.distributions.StudentT(3.0).sample((128, 128))
    plain, rotated = (
        quantize_tensor(w, TrellisWeightOnlyConfig(2, turn).spec((128, 128), w.dtype)).dequantize()
        for turn in (False, True)
    )
    assert float(sqnr(w, rotated)) > float(sqnr(w, plain)) + 1


def test_rows_are_cut_between_rings_and_columns_anywhere():
    q = quantize_tensor(
        normal(256, 48), TrellisWeightOnlyConfig(2, False).spec((256, 48), torch.float32)
    )
    dense = q.dequantize()
    assert torch.equal(q[128:, 5:21].dequantize(), dense[128:, 5:21])
    with pytest.raises(UnsupportedOp, match="start=64 cuts through 128"):
        q[64:]


def test_what_it_does_not_hold():
    w = normal(8, 8)
    rule = (("scale_rule", "absmean"),)
    for spec, text in (
        (Spec("int5", (1, -1), layout="trellis", options=rule), "2 to 4 bits.*int5"),
        (Spec("int2", (1, -1), layout="trellis"), "scale_rule"),
    ):
        with pytest.raises(QuantizationError, match=text):
            quantize_tensor(w, spec)
    grid = grid_of(quantize_tensor(w, Spec("int2", (1, -1), layout="trellis", options=rule)))
    with pytest.raises(UnsupportedOp, match="several codes of its column"):
        grid.nearest(w, grid.block_of)


def test_gptq_is_exact_about_its_own_error_in_the_rotated_space():
    """Σ e² = tr(Δ H Δᵀ) of the logical weight, with the damping in the space that is rounded."""
    w, x = (
        normal(130, 24).double(),
        normal(300, 24, seed=1).double() @ normal(24, 24, seed=2).double(),
    )
    hessian = x.t() @ x
    q = quantize_tensor(w.float(), TrellisWeightOnlyConfig(2).spec((130, 24), torch.float32))
    (stepped,), (turned,) = stepped_problem(w[None], [hessian], q)
    matrix = torch.block_diag(*[hadamard_matrix(8).double() / 8**0.5] * 3)
    torch.testing.assert_close(turned, matrix @ hessian @ matrix.t())
    torch.testing.assert_close(stepped, w @ matrix.t())
    factor, _ = damped_factor(turned, 1e-10)
    grid = grid_of(q)
    codes, total, _ = gptq(stepped, factor, grid, grid.block_of)
    change = regridded(q, codes).dequantize().double() - w
    torch.testing.assert_close(
        float(((change @ hessian) * change).sum()), float(total), rtol=1e-4, atol=0
    )
    nearest = q.dequantize().double() - w
    assert 0.02 < float(total) / float(((nearest @ hessian) * nearest).sum()) < 0.8


def test_columns_alone_are_rounded_as_all_at_once():
    w = normal(130, 6)
    q = quantize_tensor(w, TrellisWeightOnlyConfig(4, False).spec((130, 6), w.dtype))
    grid = grid_of(q)
    rounder = grid.rounder(grid.block_of)
    values = [rounder.nearest(w[:, i], i) for i in range(6)]
    assert torch.equal(torch.stack(values, 1), q.dequantize())
    assert torch.equal(regridded(q, rounder.codes()).qdata, q.qdata)


def test_through_a_file_and_a_compiler(tmp_path):
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 36)).eval()
    data = [normal(80, 64, seed=seed) for seed in range(3)]
    report = quantize_(model, GPTQConfig(TrellisWeightOnlyConfig(3)), data=data)
    assert all(0 < r.error_vs_rtn < 1 for r in report.with_status("changed"))
    save_model(model, tmp_path)
    again = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 36)).eval()
    load_model(again, tmp_path)
    assert isinstance(again[0].weight, QTensor)
    expected = model(data[0])
    assert torch.equal(again(data[0]), expected)
    with kernels("reference"):
        torch.testing.assert_close(again(data[0]), expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(data[0]), expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_the_input_are_those_of_the_dense_weight():
    w = quantize_tensor(normal(40, 32), TrellisWeightOnlyConfig(2).spec((40, 32), torch.float32))
    x = normal(3, 32).requires_grad_()
    F.linear(x, w).square().sum().backward()
    y = x.detach().clone().requires_grad_()
    F.linear(y, w.dequantize()).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def test_what_is_no_linear_layer_is_skipped_with_the_reason():
    model = nn.ModuleDict(
        {
            "conv": nn.Conv1d(8, 8, 3),
            "attention": nn.MultiheadAttention(32, 4),
            "linear": nn.Linear(8, 8),
        }
    )
    report = quantize_(model, TrellisWeightOnlyConfig(2))
    changed = {record.fqn for record in report.with_status("changed")}
    assert changed == {"linear.weight", "attention.out_proj.weight"}
    skipped = {record.fqn: record.reason for record in report.with_status("skipped")}
    assert skipped.keys() == {"conv.weight", "attention.in_proj_weight"}
    assert "weights of linear layers" in skipped["attention.in_proj_weight"]
