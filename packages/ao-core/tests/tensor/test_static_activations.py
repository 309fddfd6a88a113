"""Static scales of activations: parts of a weight, whatever its layout, and what matmuls make of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ao_core
from ao_core import WHOLE, QTensor, Spec
from ao_core.checkpoints.rows import by_rows
from ao_core.compute import ComputeWeight
from ao_core.errors import CheckpointError, ConfigError, QuantizationError, UnsupportedOp
from ao_core.layouts import Layout, Parts
from ao_core.numerics import choose_qparams, qparams_of_range
from ao_core.records import DType
from ao_core.registry import registry
from ao_core.tensor import fake_quantize, quantize_tensor, to_layout
from ao_core.tensor.saving.leaves import flatten, rebuild
from ao_core.testing.base import gaussian, same_bits

ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
ACTS = {
    "int8": Spec("int8", TENSOR, static=True),
    "uint8": Spec("uint8", TENSOR, zero_point="int", static=True),
    "e4m3": Spec("f8e4m3", TENSOR, static=True),
}


def _weight(act: str = "uint8", seed: int = 0, rows: int = 33) -> QTensor:
    zero_point = 117 if act == "uint8" else None
    spec = Spec("int8", ROW, act=ACTS[act])
    return quantize_tensor(
        gaussian((rows, 70), seed=seed), spec, act_scale=0.04, act_zero_point=zero_point
    )


def test_the_spec_says_so() -> None:
    spec = Spec("int8", ROW, act=ACTS["uint8"])
    assert "act=(uint8[*×*] scale=float32 zero_point=int static plain)" in str(spec)
    assert Spec.from_dict(spec.to_dict()) == spec
    assert "static" not in spec.to_dict()  # files without static scales are what they always were
    assert spec.to_dict()["act"]["static"] is True
    for block in (ROW, (WHOLE,), (1, 32)):
        with pytest.raises(ConfigError, match=r"static=True with block.*use block=\(-1, -1\)"):
            Spec("int8", block, static=True)


def test_missing_and_superfluous_values_are_refused() -> None:
    x, static = gaussian((4, 8)), Spec("int8", ROW, act=ACTS["uint8"])
    for given, name in ({}, "act_scale"), ({"act_scale": 1.0}, "act_zero_point"):
        with pytest.raises(QuantizationError, match=f"{name}=None: the format .* needs it"):
            quantize_tensor(x, static, **given)  # type: ignore[arg-type]
    for spec in (Spec("int8", ROW), Spec("int8", ROW, act=Spec("int8", ROW))):
        with pytest.raises(
            QuantizationError, match=r"act_scale=0.5 \(float\): .* has no place for it"
        ):
            quantize_tensor(x, spec, act_scale=0.5)
    with pytest.raises(QuantizationError, match="a static scale is not chosen but given"):
        fake_quantize(x, ACTS["int8"])
    with pytest.raises(QuantizationError, match="a static scale is not chosen but given"):
        F.linear(x, ComputeWeight(gaussian((3, 8)), static))


@pytest.mark.parametrize("band", ["reference", "torch"])
@pytest.mark.parametrize("act", ["int8", "uint8"])
def test_the_scale_of_a_batch_gives_what_a_dynamic_one_gives(act: str, band: str) -> None:
    x, dense = gaussian((9, 70), seed=3), gaussian((33, 70))
    static = ACTS[act]
    fmt = registry.dtypes.get(static.dtype)
    scale, zero_point = choose_qparams(x, fmt, TENSOR, static.zero_point)
    dynamic = quantize_tensor(dense, Spec("int8", ROW, act=replace(static, static=False)))
    w = quantize_tensor(
        dense, Spec("int8", ROW, act=static), act_scale=scale, act_zero_point=zero_point
    )
    with ao_core.kernels("reference"):
        expected = F.linear(x, dynamic)
    with ao_core.kernels(band):
        torch.testing.assert_close(F.linear(x, w), expected, rtol=2e-6, atol=2e-5)
        # a value beyond the range is clipped, and all others stay what they were
        wild = torch.cat([x, torch.full((1, 70), 1e4)])
        torch.testing.assert_close(F.linear(wild, w)[:9], expected, rtol=2e-6, atol=2e-5)
        clipped = F.linear(wild, w)[9].norm() / w.dequantize().sum(1).norm()
    assert 2.0 < float(clipped) < 5.0


def test_copies_of_values_leave_the_scale_alone() -> None:
    w, other = _weight(), gaussian((33, 70), seed=9)
    w.copy_(other)
    assert same_bits(w.qdata, quantize_tensor(other, Spec("int8", ROW)).qdata)
    w.mul_(0.5)
    w[3:5].copy_(other[:2])
    assert float(w.act_scale) == torch.tensor(0.04)
    assert int(w.act_zero_point) == 117


def test_a_weight_of_the_same_format_brings_its_own() -> None:
    w = _weight()
    other = replace_act(_weight(seed=1), 0.5, 3)
    with pytest.raises(UnsupportedOp, match="its 'act_"):
        w[3:5].copy_(other[:2])
    w.copy_(other)
    assert (float(w.act_scale), int(w.act_zero_point)) == (0.5, 3)


def replace_act(w: QTensor, scale: float, zero_point: int) -> QTensor:
    parts = {**w.parts, "act_scale": torch.full((1, 1), scale)}
    parts["act_zero_point"] = torch.full((1, 1), zero_point, dtype=torch.uint8)
    return w.like(parts)


def test_pieces_join_only_with_one_scale() -> None:
    w = _weight()
    assert torch.equal(torch.cat([w[:5], w[5:]]).act_scale, w.act_scale)
    with pytest.raises(UnsupportedOp, match="do not share one 'act_scale'"):
        torch.cat([w, replace_act(w, 0.5, 117)])
    experts = torch.stack([w, replace_act(w, 0.5, 3)])
    assert experts.act_scale.shape == experts.act_zero_point.shape == (2, 1, 1)
    assert float(experts[1].act_scale) == 0.5
    assert experts.new_zeros((3, 33, 70)).act_scale.shape == (3, 1, 1)
    # a rank of FSDP without rows has it too
    assert float(w.new_empty(0).act_scale) == torch.tensor(0.04)


def test_experts_each_have_a_scale_of_scales() -> None:
    act = Spec("f4e2m1", (1, 16), scale_dtype=Spec("f8e4m3", TENSOR, static=True))
    spec, x = Spec("int8", ROW, act=act), gaussian((2, 5, 64), seed=4)
    pair = [
        quantize_tensor(gaussian((33, 64), seed=seed), spec, act_scale=scale)
        for seed, scale in ((0, 0.002), (1, 0.02))
    ]
    experts: Tensor = torch.stack(pair)
    expected = torch.stack([F.linear(rows, w) for rows, w in zip(x, pair, strict=True)])
    assert torch.equal(torch.bmm(x, experts.transpose(-2, -1)), expected)
    torch.testing.assert_close(_compiled_bmm(x, experts), expected)


def _compiled_bmm(x: Tensor, experts: Tensor) -> Tensor:
    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x, w.transpose(-2, -1))

    compiled: Tensor = torch.compile(call, backend="aot_eager", fullgraph=True)(x, experts)
    return compiled


def test_experts_each_have_a_scale() -> None:
    pair = [_weight(), replace_act(_weight(seed=1), 0.01, 128)]
    experts: Tensor = torch.stack(pair)
    x = gaussian((2, 5, 70), seed=4)
    expected = torch.stack([F.linear(rows, w) for rows, w in zip(x, pair, strict=True)])
    assert torch.equal(torch.bmm(x, experts.transpose(-2, -1)), expected)
    torch.testing.assert_close(_compiled_bmm(x, experts), expected)


class _Upside(Layout):
    """`plain` with the last row first."""

    name, canonical, canonical_name = "upside", False, "plain"

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        return {"qdata": parts["qdata"].flip(0), "scale": parts["scale"].flip(0)}

    from_canonical = to_canonical


def test_other_layouts_keep_it() -> None:
    w = _weight("e4m3")
    ao_core.reopen()
    ao_core.register(_Upside())
    other = to_layout(w, "upside")
    assert set(other.part_names) == {"qdata", "scale", "act_scale"}
    assert torch.equal(other.dequantize(), w.dequantize())
    assert other.canonical().spec == w.spec
    assert torch.equal(other.canonical().act_scale, w.act_scale)
    assert torch.equal(other[3:5].act_scale, w.act_scale)


def test_files_are_checked() -> None:
    leaves, record = flatten("w", _weight())
    assert record is not None
    assert {"w.act_scale", "w.act_zero_point"} < leaves.keys()
    again = rebuild("w", record, leaves.__getitem__)
    assert all(
        same_bits(a, b) for (_, a), (_, b) in zip(again.leaves(), _weight().leaves(), strict=True)
    )
    wrong = {**leaves, "w.act_scale": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"'act_scale' is float32 of shape \(3,\)"):
        rebuild("w", record, wrong.__getitem__)
    del record["parts"]["act_zero_point"]
    with pytest.raises(CheckpointError, match="act_zero_point"):
        rebuild("w", record, leaves.__getitem__)


def test_large_weights_are_quantized_some_rows_at_a_time() -> None:
    spec, seen = Spec("int8", ROW, act=ACTS["uint8"]), []

    def apply(rows: Tensor) -> QTensor:
        seen.append(rows.shape)
        return quantize_tensor(rows, spec, act_scale=0.04, act_zero_point=117)

    new = by_rows(gaussian((300, 70)), apply, elements=1)
    assert isinstance(new, QTensor)
    assert (128, 70) in seen
    whole = quantize_tensor(gaussian((300, 70)), spec, act_scale=0.04, act_zero_point=117)
    for (name, a), (_, b) in zip(new.leaves(), whole.leaves(), strict=True):
        assert same_bits(a, b), name


def test_a_range_gives_scale_and_zero_point() -> None:
    fmt = registry.dtypes.get("uint8")
    scale, zero_point = qparams_of_range(torch.tensor(-1.0), torch.tensor(3.0), fmt, "int")
    w = quantize_tensor(
        gaussian((4, 8)),
        Spec("int8", ROW, act=ACTS["uint8"]),
        act_scale=scale,
        act_zero_point=zero_point,
    )
    x = torch.tensor([[-1.0, 3.0, 0.0, 9.0, -9.0, 1.0, 2.0, 0.5]])
    values = fake_quantize(x, ACTS["uint8"], w.act_scale, w.act_zero_point)
    assert (values - x.clamp(-1, 3)).abs().max() <= 2 / 255 + 1e-6
    assert float(values[0, 2]) == 0.0


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def _nvfp4(x: Tensor, shared: float) -> Tensor:
    """NVFP4 by its definition, in float64, with a given scale of the scales of blocks."""
    blocks = x.double().reshape(len(x), -1, 16)
    scale = (blocks.abs().amax(-1, keepdim=True).float() / 6 / shared).clamp(max=448)
    scale = scale.to(torch.float8_e4m3fn).double() * shared
    ratio = torch.where(scale == 0, 0, blocks.abs() / scale).unsqueeze(-1)
    nearest = E2M1[(ratio - E2M1).abs().argmin(-1)]  # ties do not occur in these samples
    return (nearest * scale * blocks.sign()).reshape(x.shape)


@pytest.mark.parametrize("shared", [3.5 / 6 / 448, 1e-4, 0.25])
def test_scales_of_blocks_may_share_a_static_one(shared: float) -> None:
    """Right, too small so that blocks are clipped, and so large that scales of blocks become 0."""
    act = Spec("f4e2m1", (1, 16), scale_dtype=Spec("f8e4m3", TENSOR, static=True))
    assert act.is_static
    assert not act.static
    assert Spec.from_dict(act.to_dict()) == act
    x, dense = gaussian((9, 64), seed=3), gaussian((33, 64))
    x[0, :16], x[1] = 0, x[1] * 1e-3
    shared = float(torch.tensor(shared))
    w = quantize_tensor(dense, Spec("int8", ROW, act=act), act_scale=shared)
    values = _nvfp4(x, shared)
    torch.testing.assert_close(
        fake_quantize(x, act, w.act_scale).double(), values, rtol=1e-6, atol=0
    )
    expected = values @ w.dequantize().double().t()
    out = F.linear(x, w)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    # unlike with a dynamic one, no row depends on the others
    cast = fake_quantize(x, act, w.act_scale)
    assert torch.equal(fake_quantize(torch.cat([x, 100 * x]), act, w.act_scale)[:9], cast)
    for given in ({}, {"act_scale": 1.0, "act_zero_point": 3}):
        with pytest.raises(QuantizationError, match="act_(scale|zero_point)=.*the format"):
            quantize_tensor(dense, w.spec, **given)  # type: ignore[arg-type]


def test_a_static_scale_of_scales_is_the_only_static_one() -> None:
    shared = Spec("f8e4m3", TENSOR, static=True)
    for wrong in (
        lambda: Spec("int8", TENSOR, scale_dtype=shared, static=True),
        lambda: Spec("uint4", (1, 16), scale_dtype=shared, zero_point="int"),
    ):
        with pytest.raises(ConfigError, match="use static=False and zero_point='none'"):
            wrong()
    with pytest.raises(QuantizationError, match="a static scale is not chosen but given"):
        quantize_tensor(gaussian((4, 32)), Spec("f4e2m1", (1, 16), scale_dtype=shared))


@pytest.mark.parametrize("band", ["reference", "torch"])
@pytest.mark.parametrize(
    "act", [*ACTS.values(), Spec("f4e2m1", (1, 16), Spec("f8e4m3", TENSOR, static=True))], ids=str
)
def test_rows_that_are_not_finite_are_lost_and_no_other(act: Spec, band: str) -> None:
    """As a dense matmul of such a row, whose every sum has the NaN or an inf."""
    zero_point = 117 if act.zero_point == "int" else None
    spec = Spec("f8e4m3" if act.dtype == "f8e4m3" else "int8", ROW, act=act)
    w = quantize_tensor(gaussian((32, 64)), spec, act_scale=0.04, act_zero_point=zero_point)
    x = gaussian((4, 64), seed=3)
    with ao_core.kernels(band) if band == "reference" or "int8" in act.dtype else nullcontext():
        expected = F.linear(x, w)
        for value in (float("nan"), float("inf"), -float("inf")):
            bad = x.clone()
            bad[1, 5] = value
            out = F.linear(bad, w)
            assert not out[1].isfinite().any()
            assert torch.equal(out[[0, 2, 3]], expected[[0, 2, 3]])
