"""Input steps: pieces, copies, writes and files of weights that have them."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ao_core
from ao_core import WHOLE, Kernel, QTensor, Spec, quantize_tensor
from ao_core.checkpoints.rows import by_rows
from ao_core.compute import ComputeWeight
from ao_core.errors import CheckpointError, ConfigError, QuantizationError, UnsupportedOp
from ao_core.layouts import SHARED
from ao_core.quantize import sample_sqnr
from ao_core.steps import PERMUTE, SCALE, Step, hadamard_step
from ao_core.tensor import fake_quantize, repack, to_layout
from ao_core.tensor.cut import geometry
from ao_core.tensor.encoding import encode_parts
from ao_core.tensor.fsdp import post_all_gather, pre_all_gather
from ao_core.tensor.input_steps import stored_spec
from ao_core.tensor.saving.leaves import flatten, rebuild
from ao_core.testing.base import gaussian, same_bits
from ao_core.testing.input_steps import step_values
from ao_core.testing.samples import quantized

ROW = (1, WHOLE)
N, K, BLOCK = 33, 72, 8
FORMATS = {
    "int4": Spec("int4", (1, 32), "bfloat16", layout="packed"),
    "int8": Spec("int8", ROW),
    "float8": Spec("f8e4m3", ROW, act=Spec("f8e4m3", ROW)),
    "nf4": Spec("nf4", (1, 24), Spec("int8", (4, WHOLE)), layout="packed"),
}
STEPS = {
    "permute": (PERMUTE,),
    "scale": (SCALE,),
    "hadamard": (hadamard_step(BLOCK),),
    "paley": (hadamard_step(12), SCALE),
    "all": (PERMUTE, SCALE, hadamard_step(BLOCK)),
    "turned": (hadamard_step(BLOCK), SCALE, PERMUTE),
}
ALL = STEPS["all"]


def _weight(
    steps: tuple[Step, ...] = ALL,
    spec: Spec = FORMATS["int8"],
    seed: int = 0,
) -> QTensor:
    spec = replace(spec, input=steps)
    return quantize_tensor(
        gaussian((N, K), seed=seed), spec, **step_values(spec, (N, K), seed + 31)
    )


def _error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


# -- pieces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_rows_are_cut_and_joined(steps: tuple[Step, ...]) -> None:
    q = _weight(steps)
    dense, pieces = q.dequantize(), (q[:5], q[5:20], q[20:])
    for piece, part in zip(pieces, dense.split((5, 15, 13)), strict=True):
        assert torch.equal(piece.dequantize(), part)
    assert same_bits(torch.cat(pieces).dequantize(), dense)
    assert torch.equal(q[3].dequantize(), dense[3])
    assert torch.equal(q.T[:, 3:9].dequantize(), dense.T[:, 3:9])
    whole = torch.cat([q, _weight(steps, seed=0)])
    assert torch.equal(whole.dequantize(), torch.cat([dense, dense]))
    if steps != (hadamard_step(BLOCK),):
        with pytest.raises(UnsupportedOp, match=r"do not share one 'in_(perm|scale)'"):
            torch.cat([q, _weight(steps, seed=5)])


def test_columns_are_cut_where_the_steps_allow_it() -> None:
    q = _weight((SCALE, hadamard_step(BLOCK)), Spec("int8", (1, 8)))
    dense = q.dequantize()
    torch.testing.assert_close(q[:, 16:40].dequantize(), dense[:, 16:40])
    torch.testing.assert_close(torch.cat([q[:, :16], q[:, 16:]], 1).dequantize(), dense)
    x = gaussian((5, 24), seed=3)
    torch.testing.assert_close(F.linear(x, q[:, 16:40]), F.linear(x, dense[:, 16:40]))
    plain = _weight((SCALE, hadamard_step(BLOCK)), Spec("int8", ROW))
    for start, end in (4, 40), (8, 20):
        with pytest.raises(
            UnsupportedOp, match=r"slice on .*cut through a block of the input step"
        ):
            plain[:, start:end]
    permuted = _weight((PERMUTE,))
    assert torch.equal(permuted[:, :K].dequantize(), permuted.dequantize())
    with pytest.raises(UnsupportedOp, match="'permute' takes columns to any place"):
        permuted[:, :8]
    with pytest.raises(UnsupportedOp, match="'permute' is one of all columns"):
        torch.cat([permuted, permuted], 1)
    for steps in STEPS.values():
        with pytest.raises(UnsupportedOp, match="select on .*input steps are along the columns"):
            _weight(steps)[:, 3]


def test_a_row_of_experts_and_single_rows_have_no_steps_of_one_matrix() -> None:
    experts = torch.stack([_weight((SCALE,)), _weight((SCALE,), seed=3)])
    with pytest.raises(UnsupportedOp, match="select on .*input steps"):
        experts[:, 2]
    row = _weight()[2]
    with pytest.raises(UnsupportedOp, match="stack on .*input steps of their own"):
        torch.stack([row, row])


def test_sharding_along_rows() -> None:
    q = _weight(spec=FORMATS["int4"])[:32]
    shards = [q[:16], q[16:]]
    sent = [pre_all_gather(shard, (32, K), 2) for shard in shards]
    outputs = tuple(torch.cat(pieces) for pieces in zip(*(s[0] for s in sent), strict=True))
    whole, _ = post_all_gather(shards[1], outputs, sent[1][1], torch.float32, None)
    assert torch.equal(whole.dequantize(), q.dequantize())
    # a rank without rows
    empty = q.new_empty(0)
    assert same_bits(empty.in_scale, q.in_scale)
    assert same_bits(empty.in_perm, q.in_perm)


# -- writes, copies and moves ----------------------------------------------------------------------


def test_writes_go_through_the_steps_of_the_target() -> None:
    q, new = _weight(), gaussian((N, K), seed=8)
    before = {name: part.clone() for name, part in q.parts.items()}
    q.copy_(new)
    assert _error(q.dequantize(), new) < 0.02
    dense = q.dequantize()
    q.add_(new, alpha=0.5)
    assert _error(q.dequantize(), dense + 0.5 * new) < 0.02
    q.mul_(0.5)
    q[3:5].copy_(new[:2])
    assert _error(q[3:5].dequantize(), new[:2]) < 0.02
    assert _error(q[5:].dequantize(), 0.5 * (dense + 0.5 * new)[5:]) < 0.02
    for name in "in_perm", "in_scale":
        assert same_bits(getattr(q, name), before[name])
    # another tensor of the format brings its own steps, or its values
    other = _weight(seed=5)
    with pytest.raises(UnsupportedOp, match=r"its 'in_(perm|scale)' is shared"):
        q[3:5].copy_(other[:2])
    q.copy_(other)
    assert same_bits(q.in_perm, other.in_perm)
    assert torch.equal(q.dequantize(), other.dequantize())
    q.copy_(quantize_tensor(new, Spec("int8", ROW)))
    assert _error(q.dequantize(), new) < 0.02
    plain = quantize_tensor(new, Spec("int8", ROW))
    plain.copy_(other)
    assert _error(plain.dequantize(), other.dequantize()) < 0.02


def test_data_and_new_sizes() -> None:
    p = nn.Parameter(_weight(), requires_grad=False)
    p.data = gaussian((7, K), seed=8)
    assert p.shape == (7, K)
    assert _error(p.dequantize(), gaussian((7, K), seed=8)) < 0.02
    with pytest.raises(UnsupportedOp, match="'in_(perm|scale)' has the shape"):
        p.data = gaussian((7, 80), seed=8)
    q = _weight()
    larger = q.new_zeros((5, 80))
    assert larger.in_perm.tolist() == [list(range(80))]
    assert larger.copy_(gaussian((5, 80))).isfinite().all()
    with pytest.raises(UnsupportedOp, match=r"hadamard\(8\).*whole blocks.*60 elements"):
        q.new_zeros((5, 60))
    for made in torch.zeros_like(q), torch.empty_like(q, device="meta"):
        assert made.in_scale.shape == (1, K)
    assert not torch.zeros_like(q).dequantize().any()
    assert same_bits(torch.zeros_like(q).in_perm, q.in_perm)


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_copies_are_alike(spec: Spec) -> None:
    q = _weight(spec=spec)

    def saved(tensor: Tensor) -> Tensor:
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    made = (
        *(q.clone(), q.detach(), copy.deepcopy(q), saved(q)),
        # torch does not unpickle float8
        *([] if q.qdata.dtype.is_floating_point else [pickle.loads(pickle.dumps(q))]),
        *(q.to(torch.bfloat16).to(torch.float32), q.view(-1).view(N, K), q.T.T, q.canonical()),
    )
    for other in made:
        assert other.spec == q.spec
        assert torch.equal(other.dequantize(), q.dequantize())
    assert q.clone().in_perm.data_ptr() != q.in_perm.data_ptr()
    meta = q.to("meta")
    assert F.linear(torch.empty(5, K, device="meta"), meta).shape == (5, N)
    assert torch.equal(q.view(-1).dequantize(), q.dequantize().view(-1))


def test_layouts_of_kernels_keep_the_steps() -> None:
    spec = Spec("int4", (1, 32), "bfloat16", layout="packed", input=STEPS["all"])
    q = quantized(gaussian((64, 64)).bfloat16(), spec)
    moved, x = to_layout(q, "int4_cpu"), gaussian((3, 64), seed=3).bfloat16()
    assert torch.equal(moved.dequantize(), q.dequantize())
    assert _error(F.linear(x, moved), F.linear(x, q.dequantize())) < 0.02
    assert torch.equal(moved.canonical().dequantize(), q.dequantize())
    moved.copy_(gaussian((64, 64), seed=4))
    assert _error(moved.dequantize(), gaussian((64, 64), seed=4)) < 0.25
    assert same_bits(repack(q).in_scale, q.in_scale)


def test_the_reported_error_is_that_of_logical_values() -> None:
    w = gaussian((N, K))
    for steps in STEPS.values():
        q = quantized(w, replace(FORMATS["int8"], input=steps))
        direct = 10 * torch.log10(w.square().sum() / (w - q.dequantize()).square().sum())
        assert sample_sqnr(w, q) == pytest.approx(float(direct), abs=1e-3)
        assert float(direct) > 35


def test_rows_at_a_time_are_not_given_other_steps_each() -> None:
    """An algorithm may find scales from the rows that it sees."""

    def apply(rows: Tensor) -> QTensor:
        scale = torch.ones(rows.shape[-1]) if rows.is_meta else 1 / rows.abs().amax(0)
        spec = Spec("int8", ROW, input=(SCALE,))
        return quantize_tensor(rows, spec, in_scale=scale) if not rows.is_meta else rows

    w = gaussian((512, 16))
    out = by_rows(w, apply, elements=2048)
    assert torch.equal(out.dequantize(), apply(w).dequantize())


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_saved_models(spec: Spec, tmp_path) -> None:
    def layer() -> nn.Linear:
        return nn.Linear(K, N, bias=False)

    model, x = layer(), gaussian((5, K), seed=3)
    model.weight = nn.Parameter(_weight(spec=spec), requires_grad=False)
    ao_core.save_model(model, tmp_path / "model.safetensors")
    again = layer()
    ao_core.load_model(again, tmp_path / "model.safetensors")
    assert again.weight.spec.input == ALL
    assert torch.equal(again.weight.dequantize(), model.weight.dequantize())
    assert torch.equal(again(x), model(x))
    target = layer()
    target.weight = nn.Parameter(_weight(spec=spec, seed=4), requires_grad=False)
    target.load_state_dict(model.state_dict())
    assert torch.equal(target(x), model(x))


def test_the_spec_in_files_and_texts() -> None:
    spec = Spec("int8", ROW, input=ALL, act=Spec("int8", ROW))
    assert "input=(permute, scale, hadamard(8)) act=(int8" in str(spec)
    assert Spec.from_dict(spec.to_dict()) == spec
    assert hash(spec) != hash(stored_spec(spec))
    assert "input" not in stored_spec(spec).to_dict()  # files without steps are what they were
    data = spec.to_dict()
    for wrong, text in (
        ({"kind": "shift"}, "one of permute, scale, hadamard"),
        ({"kind": "scale", "power": 2}, "has no field 'power'"),
        ({"kind": "hadamard"}, "block=0 of the input step 'hadamard'; use a positive number"),
        ({"kind": "scale", "block": 4}, "block=4 of the input step 'scale'; use 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            Spec.from_dict({**data, "input": [wrong]})
    with pytest.raises(ConfigError, match="2 steps of kind 'scale'; a format has at most one"):
        Spec("int8", ROW, input=(SCALE, PERMUTE, SCALE))
    with pytest.raises(ConfigError, match="kind='rotate' is not a kind of input step; there are"):
        Step("rotate")
    with pytest.raises(ConfigError, match=r"act=.* has input steps; only the format of a weight"):
        Spec("int8", ROW, act=Spec("int8", ROW, input=(SCALE,)))
    with pytest.raises(ConfigError, match=r"scale_dtype=.* has input steps"):
        Spec("int8", ROW, Spec("int8", ROW, input=(SCALE,)))


def test_parts_from_anybody_are_checked() -> None:
    q = _weight()
    parts, record = flatten("w", q)
    assert torch.equal(rebuild("w", record, parts.__getitem__).dequantize(), q.dequantize())
    beyond, twice = (q.in_perm.clone() for _ in range(2))
    beyond[0, 0], twice[0, 0] = K, int(twice[0, 1])
    zero_point = q.in_scale.clone()
    zero_point[0, 3] = 0
    odd = torch.full_like(zero_point, torch.inf)
    for name, part, text in (
        ("in_perm", beyond, "each index from 0 to 71 once"),
        ("in_perm", twice, "each index from 0 to 71 once"),
        ("in_perm", q.in_perm.long(), "must be int32 of shape"),
        ("in_perm", q.in_perm[:, :8], "must be int32 of shape"),
        ("in_scale", zero_point, "finite in float32, and not 0"),
        ("in_scale", odd, "finite in float32, and not 0"),
    ):
        with pytest.raises(CheckpointError, match=text):
            rebuild("w", record, {**parts, f"w.{name}": part}.__getitem__)
    left = {name: None for name in record["parts"] if name != "in_scale"}
    with pytest.raises(CheckpointError, match="there is no part 'in_scale'"):
        rebuild("w", {**record, "parts": left}, parts.__getitem__)
    spec = record["spec"]
    with pytest.raises(CheckpointError, match="there is a part 'in_perm'"):
        rebuild("w", {**record, "spec": {**spec, "input": []}}, parts.__getitem__)
    input_ = [*spec["input"][:2], {"kind": "hadamard", "block": 16}]
    with pytest.raises(CheckpointError, match=r"hadamard\(16\).*72 elements"):
        rebuild("w", {**record, "spec": {**spec, "input": input_}}, parts.__getitem__)
    options = [["shift", 1]]
    with pytest.raises(CheckpointError, match="nobody knows 'shift'"):
        rebuild("w", {**record, "spec": {**spec, "options": options}}, parts.__getitem__)


def test_what_has_no_parts_for_steps_refuses_them() -> None:
    spec, x = Spec("int8", ROW, input=(hadamard_step(BLOCK),)), gaussian((N, K))
    with pytest.raises(ConfigError, match="whose memory is dense, has no input steps"):
        ComputeWeight(x, spec)
    with pytest.raises(UnsupportedOp, match="values are encoded after its input steps"):
        encode_parts(x, spec)
    with pytest.raises(UnsupportedOp, match=r"does not take the input step 'hadamard\(8\)'"):
        fake_quantize(x, spec)
    with pytest.raises(ConfigError, match="fuses='scales' is not a kind of input step"):
        Kernel("mine", "linear", "plain", "*", F.linear, 1, fuses=("scales",))


def test_wrong_parts_are_refused() -> None:
    spec = Spec("int8", ROW, input=(PERMUTE, SCALE))
    w, given = gaussian((N, K)), step_values(spec, (N, K))
    perm, scale = given["in_perm"], given["in_scale"]
    for given, text in (
        ({"in_perm": perm}, "in_scale=None: the format .* needs it"),
        ({"in_scale": scale}, "in_perm=None: the format .* needs it"),
    ):
        with pytest.raises(QuantizationError, match=text):
            quantize_tensor(w, spec, **given)
    with pytest.raises(QuantizationError, match="in_scale=.* has no place for it"):
        quantize_tensor(w, Spec("int8", ROW), in_scale=scale)
    for name, value, text in (
        ("in_perm", perm.float(), "float32; use an? integer"),
        ("in_perm", perm.clamp(max=K - 2), "each index from 0 to 71 once"),
        ("in_perm", perm - 1, "each index from 0 to 71 once"),
        ("in_perm", perm[:-1], r"shape \(71,\); use \(72,\)"),
        ("in_scale", scale.long(), "int64; use a floating-point"),
        ("in_scale", scale * 0, "finite in float32, and not 0"),
        ("in_scale", scale.double() * 1e-200, "finite in float32, and not 0"),
        ("in_scale", scale * torch.nan, "finite in float32, and not 0"),
        ("in_scale", scale.expand(N, K), r"shape \(33, 72\); use \(72,\)"),
    ):
        with pytest.raises(ConfigError, match=f"{name}=.*{text}"):
            quantize_tensor(w, spec, **{"in_perm": perm, "in_scale": scale, name: value})
    with pytest.raises(QuantizationError, match="by the input steps .* nearer to 1"):
        quantize_tensor(w, Spec("int8", ROW, input=(SCALE,)), in_scale=scale * 1e-38)
    with pytest.raises(QuantizationError, match=r"hadamard\(7\).*72 elements; the largest block"):
        quantize_tensor(w, Spec("int8", ROW, input=(hadamard_step(7),)))


def test_the_parts_lie_beside_those_of_the_layout() -> None:
    axes = geometry(_weight())
    assert axes["in_scale"] == axes["in_perm"]
    assert axes["in_scale"][0] is SHARED
    assert [name for name, _ in _weight().leaves()] == ["qdata", "scale", "in_perm", "in_scale"]
