"""`sparsify_` on models: what it reports, keeps, refuses, saves, and computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ao_core import (
    WHOLE,
    FqnToConfig,
    QTensor,
    Spec,
    WeightOnlyConfig,
    kernels,
    load_model,
    quantize_,
    quantize_tensor,
    save_model,
)
from ao_core.ext import ConfigError, QuantizationError, fake_quantize
from ao_sparsity import (
    block_sparse_weight,
    int4_weight_only_semi_sparse,
    int8_dynamic_activation_int8_semi_sparse_weight,
    semi_sparse_weight,
    sparsify_,
)
from ao_sparsity.masks import block_mask, n_of_m_mask
from ao_sparsity.recipes import RECIPES

BLOCKS = block_sparse_weight(blocksize=16, sparsity=0.5)
CONFIGS = [*(recipe.config for recipe in RECIPES), BLOCKS, block_sparse_weight(16, 0.5, "int8")]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__[:-6])


@pytest.fixture(autouse=True)
def _reference():
    """Whatever kernels are installed beside this package: these tests are about weights."""
    with kernels("reference"):
        yield


def model(dtype=torch.float32, seed=0, sizes=((70, 96), (96, 33))):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        (a, b), (c, d) = sizes
        return nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(c, d)).to(dtype)


def rows(*shape, seed=5, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_report_says_bytes_sparsity_and_quality():
    net = model(torch.bfloat16)
    report = sparsify_(net, "semi_sparse_weight")
    first, last = report.with_status("changed")
    assert (first.fqn, last.fqn) == ("0.weight", "2.weight")
    # 18 groups a row of 70: 36 values and 9 bytes; 24 of 96: 48 values and 12 bytes
    assert first.bytes_after == 96 * (72 + 9)
    assert last.bytes_after == 33 * (96 + 12)
    assert first.sparsity == 1 - 36 / 70
    assert last.sparsity == 0.5
    assert 6.0 < last.sqnr_db < 12.0
    assert "50.0%" in str(report)
    assert type(report).from_json(report.to_json()).to_dict() == report.to_dict()


def test_quantize_takes_the_same_configurations():
    by_sparsify, by_quantize = model(), model()
    sparsify_(by_sparsify, semi_sparse_weight())
    quantize_(by_quantize, semi_sparse_weight())
    x = rows(3, 70)
    assert torch.equal(by_sparsify(x), by_quantize(x))
    one = model()
    sparsify_(one, FqnToConfig({"2": "semi_sparse_weight"}))
    assert [type(one[i].weight.data) for i in (0, 2)] == [torch.Tensor, QTensor]
    none = model()
    sparsify_(none, semi_sparse_weight(), lambda module, name: name == "0")
    assert type(none[2].weight.data) is torch.Tensor


def test_patterns_that_are_there_stay():
    net = model(torch.bfloat16)
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.mul_(n_of_m_mask(layer.weight.abs(), 2, 4))
    x, pruned = rows(4, 70, dtype=torch.bfloat16), [net[0].weight.clone(), net[2].weight.clone()]
    expected = net(x)
    report = sparsify_(net, semi_sparse_weight())
    assert [r.sqnr_db for r in report.with_status("changed")] == [float("inf")] * 2
    assert torch.equal(net[0].weight.dequantize(), pruned[0])
    assert torch.equal(net[2].weight.dequantize(), pruned[1])
    assert torch.equal(net(x), expected)


def test_blocks_that_are_zeros_are_not_stored():
    net = model(sizes=((128, 96), (96, 64)))
    with torch.no_grad():
        net[0].weight.mul_(block_mask(net[0].weight, (16, 16), 0.75))
    dense = net[0].weight.clone()
    report = sparsify_(net, block_sparse_weight(blocksize=16))
    (done,) = report.with_status("changed")
    assert (done.fqn, done.sparsity, done.sqnr_db) == ("0.weight", 0.75, float("inf"))
    assert torch.equal(net[0].weight.dequantize(), dense)
    (skipped,) = report.with_status("skipped")
    assert skipped.fqn == "2.weight"
    assert "Prune it by blocks" in skipped.reason
    # 24 blocks of 16 × 16, a column each, and where the 4 rows begin and end
    assert "it would take 24692 bytes, and dense it takes 24576" in skipped.reason


@every_config
def test_saved_and_loaded_to_the_bit(config, tmp_path):
    net = model(torch.bfloat16)
    sparsify_(net, config, strict=True)
    save_model(net, tmp_path / "model")
    fresh = model(torch.bfloat16, seed=1)
    load_model(fresh, tmp_path / "model")
    x = rows(3, 70, dtype=torch.bfloat16)
    assert torch.equal(fresh(x), net(x))
    for mine, theirs in zip(net.parameters(), fresh.parameters(), strict=True):
        assert type(mine.data) is type(theirs.data)
        if isinstance(mine, QTensor):
            assert mine.spec == theirs.spec
            for (_, a), (_, b) in zip(mine.leaves(), theirs.leaves(), strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@every_config
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
    ids=["fp32", "bf16", "fp16"],
)
def test_products_are_those_of_the_values(config, dtype, bound):
    net = model(dtype)
    sparsify_(net, config, strict=True)
    w, x = net[0].weight, rows(2, 3, 70, dtype=dtype)
    act = w.spec.act
    values = x if act is None else fake_quantize(x.reshape(-1, 70), act).reshape(x.shape)
    exact = w.dequantize(torch.float32).double()
    expected, found = F.linear(values.double(), exact, net[0].bias.double()), net[0](x)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() <= bound * expected.norm()
    inputs = x.clone().requires_grad_(True)
    F.linear(inputs, w).sum().backward()
    torch.testing.assert_close(
        inputs.grad, torch.ones_like(found) @ w.dequantize(), rtol=1e-2, atol=1e-2
    )


def test_dynamic_activations_multiply_exact_codes():
    net = nn.Sequential(nn.Linear(64, 48, bias=False))
    sparsify_(net, int8_dynamic_activation_int8_semi_sparse_weight())
    w, x = net[0].weight, rows(5, 64)
    codes = quantize_tensor(x, Spec("int8", (1, WHOLE)))
    dense = torch.zeros(48, 64)
    places = torch.stack([w.index & 3, w.index >> 2 & 3, w.index >> 4 & 3, w.index >> 6], -1).long()
    columns = places.reshape(48, 32) + 4 * torch.arange(16).repeat_interleave(2)
    dense.scatter_(1, columns, w.qdata.float())
    exact = codes.qdata.double() @ dense.double().t() * codes.scale.double() * w.scale.double().t()
    torch.testing.assert_close(net(x).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [CONFIGS[1], BLOCKS], ids=["two_four", "bsr"])
def test_compiled_and_exported(config):
    net = model()
    sparsify_(net, config)
    x = rows(4, 70)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-5, atol=1e-5)
    program = torch.export.export(net, (x,))
    torch.testing.assert_close(program.module()(x), net(x), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


def test_any_format_in_any_layout():
    for dtype, zero_point in (
        ("f6e3m2", "none"),
        ("uint5", "int"),
        ("nf4", "none"),
        ("fp16", "none"),
    ):
        for layout in ("two_four", "bsr"):
            net = model()
            wide = dtype == "fp16"
            group, scale = ("row", "own") if wide else (32, "bfloat16")
            config = WeightOnlyConfig(dtype, group, scale, zero_point, layout=layout)
            report = sparsify_(net, config, strict=True)
            assert net[0].weight.spec.dtype == dtype
            assert net[0].weight.canonical().spec.layout == layout
            assert all(r.sqnr_db > 5 for r in report.with_status("changed"))


@every_config
def test_any_shape(config):
    for n, k in ((1, 1), (5, 3), (2, 7), (130, 66)):
        net = nn.Sequential(nn.Linear(k, n))
        report = sparsify_(net, config)
        assert report.records[0].status in ("changed", "skipped")
        assert torch.isfinite(net(torch.ones(2, k))).all()


@every_config
def test_bad_weights_change_nothing(config):
    net = model()
    with torch.no_grad():
        net[2].weight[3, 5] = torch.nan
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(QuantizationError, match=r"2\.weight has 1 NaN"):
        sparsify_(net, config)
    for new, old in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def test_convolutions_are_skipped_with_a_reason():
    report = sparsify_(nn.Sequential(nn.Conv2d(4, 4, 3)), semi_sparse_weight())
    (skipped,) = report.with_status("skipped")
    assert "filters of a convolution" in skipped.reason
    assert "'two_four'" in skipped.reason


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda: block_sparse_weight(blocksize=0), "blocksize=0"),
        (lambda: block_sparse_weight(blocksize=1.5), "blocksize=1.5"),
        (lambda: block_sparse_weight(sparsity=-0.1), "sparsity=-0.1"),
        (lambda: block_sparse_weight(sparsity=True), "sparsity=True"),
        (lambda: int4_weight_only_semi_sparse(group_size=48), "group_size=48"),
    ],
)
def test_configurations_say_what_is_wrong(make, parameter):
    with pytest.raises(ConfigError, match=parameter):
        make()
