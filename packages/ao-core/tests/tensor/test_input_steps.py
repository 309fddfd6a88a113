"""Input steps: the logical values stay right whoever serves, and no step is ever ignored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ao_core
from ao_core import WHOLE, Kernel, QTensor, Spec, quantize_tensor
from ao_core.records import Call
from ao_core.steps import PERMUTE, SCALE, Step, hadamard_step
from ao_core.tensor import fake_quantize, repack
from ao_core.tensor.encoding import encode_parts
from ao_core.tensor.step_matmuls import without_steps
from ao_core.testing.base import gaussian
from ao_core.testing.input_steps import step_matrix, step_values
from ao_core.testing.registered import registered
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


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_matmuls_are_those_of_the_logical_weight(
    dtype: torch.dtype, spec: Spec, steps: tuple[Step, ...]
) -> None:
    w = gaussian((N, K)).to(dtype)
    q = quantized(w, replace(spec, input=steps))
    s, rtol = (
        step_matrix(q),
        {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype],
    )
    # what is stored: W S⁻¹ in the same format without steps
    stored = without_steps(q, len(steps))
    assert stored.spec == spec
    assert set(stored.part_names) == set(encode_parts(w, spec))
    of_stepped = quantize_tensor((w.double() @ torch.linalg.inv(s)).float(), spec).dequantize()
    # values between two codes may go either way
    assert _error(stored.dequantize(torch.float32), of_stepped) < 5e-3
    # what it means: undone
    logical = stored.dequantize(torch.float32).double() @ s
    assert q.dequantize().dtype == dtype
    assert _error(q.dequantize(torch.float32), logical) < 1e-6
    assert _error(q.dequantize(), logical) < rtol
    assert _error(q.dequantize(torch.float64), logical) < 1e-6
    # what it does, in any shape
    for shape in (), (5,), (0,), (2, 3), (1, 1, 2):
        x = gaussian((*shape, K), seed=3).to(dtype)
        stepped = (x.double() @ s.T).to(dtype)
        if spec.act is not None:
            stepped = fake_quantize(stepped.reshape(-1, K), spec.act).reshape(x.shape)
        bias = gaussian((N,), seed=4).to(dtype)
        out = F.linear(x, q, bias)
        assert (out.dtype, out.shape) == (dtype, (*shape, N))
        if x.numel():
            expected = stepped.double() @ stored.dequantize(torch.float32).double().T
            assert _error(out, expected + bias.double()) < (2e-2 if spec.act else 3 * rtol)
            loose = x.double() @ w.double().T + bias.double()
            assert _error(out, loose) < {"int8": 0.05, "f8e4m3": 0.15}.get(spec.dtype, 0.4)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_every_way_to_multiply(steps: tuple[Step, ...]) -> None:
    q, x = _weight(steps), gaussian((5, K), seed=3)
    dense = q.dequantize()
    expected, y = F.linear(x, dense), gaussian((5, N), seed=5)
    for out in x @ q.T, torch.mm(x, q.t()), x @ q.transpose(0, 1), F.linear(x[None], q)[0]:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(y @ q, y @ dense)
    torch.testing.assert_close(torch.mv(q, x[0]), dense @ x[0])
    torch.testing.assert_close(torch.einsum("mk,nk->mn", x, q), expected, rtol=1e-5, atol=1e-4)
    wide = torch.nn.Parameter(x.clone())
    F.linear(wide, q).square().sum().backward()
    torch.testing.assert_close(wide.grad, 2 * expected @ dense, rtol=1e-4, atol=1e-3)
    for flat in (x.requires_grad_(), x.t().contiguous().t()):
        torch.testing.assert_close(F.linear(flat, q), expected, rtol=1e-5, atol=1e-4)
    assert F.linear(x.double(), q).dtype == torch.float64
    with ao_core.kernels("reference"):
        torch.testing.assert_close(F.linear(x, q), expected, rtol=1e-5, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert _error(F.linear(x, q), expected) < 2e-2
    with torch.inference_mode():
        F.linear(x, _weight(steps))


def test_the_gradient_of_a_weight_that_is_trained_is_that_of_its_values() -> None:
    q, x = nn.Parameter(_weight()), gaussian((2, 5, K), seed=3)
    F.linear(x, q).square().sum().backward()
    dense = q.detach().dequantize().requires_grad_()
    F.linear(x, dense).square().sum().backward()
    torch.testing.assert_close(q.grad, dense.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_functional_transforms() -> None:
    q, x, t = _weight(), gaussian((5, K), seed=3), gaussian((5, K), seed=4)
    dense = q.dequantize()
    out, tangent = torch.func.jvp(lambda x: F.linear(x, q), (x,), (t,))
    torch.testing.assert_close(out, F.linear(x, dense), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(tangent, F.linear(t, dense), rtol=1e-5, atol=1e-4)
    batch = torch.func.vmap(lambda row: F.linear(row, q))(x)
    torch.testing.assert_close(batch, F.linear(x, dense), rtol=1e-5, atol=1e-4)


def test_activations_are_quantized_after_the_steps() -> None:
    act = Spec("int8", (WHOLE, WHOLE), static=True)
    spec = Spec("int8", ROW, act=act, input=(SCALE,))
    scale, x = torch.full((K,), 100.0), gaussian((5, K), seed=3)
    q = quantize_tensor(gaussian((N, K)), spec, act_scale=4.0, in_scale=scale)
    assert _error(F.linear(x, q), F.linear(x, q.dequantize())) < 0.02
    assert q.part_names == ("qdata", "scale", "act_scale", "in_scale")


def test_quantized_activations_of_another_layer_are_not_taken_as_they_are() -> None:
    q, x = _weight((SCALE,), FORMATS["float8"]), gaussian((5, K), seed=3)
    codes = quantize_tensor(x, replace(FORMATS["float8"], act=None))
    torch.testing.assert_close(F.linear(codes, q), F.linear(codes.dequantize(), q.dequantize()))


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_experts_each_have_their_own(steps: tuple[Step, ...]) -> None:
    pair = [_weight(steps, seed=seed) for seed in (0, 7, 9)]
    experts: Tensor = torch.stack(pair)
    x = gaussian((3, 5, K), seed=4)
    expected = torch.stack([F.linear(rows, w) for rows, w in zip(x, pair, strict=True)])
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(torch.bmm(x, experts.transpose(-2, -1)), expected, **close)
    torch.testing.assert_close(
        torch.bmm(expected, experts), expected @ experts.dequantize(), **close
    )
    ends = torch.tensor([2, 2, 9], dtype=torch.int32)
    rows = gaussian((11, K), seed=5)
    out = torch._grouped_mm(rows, experts.transpose(-2, -1), ends)
    parts = [rows[:2] @ pair[0].T, rows[2:9] @ pair[2].T, torch.zeros(2, N)]
    torch.testing.assert_close(out, torch.cat(parts), **close)
    traced = torch.compile(
        lambda x, w: torch.bmm(x, w.transpose(-2, -1)), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(traced(x, experts), expected, **close)
    for index, w in enumerate(pair):
        assert torch.equal(experts[index].dequantize(), w.dequantize())
    # of all experts the same
    spec = replace(FORMATS["int8"], input=steps)
    shared = quantize_tensor(gaussian((2, N, K)), spec, **step_values(spec, (K,)))
    assert _error(shared.dequantize(), gaussian((2, N, K))) < 0.02


def test_an_embedding_gathers_logical_rows() -> None:
    q, ids = _weight(spec=FORMATS["int4"]), torch.tensor([[3, 0], [32, 3]])
    torch.testing.assert_close(F.embedding(ids, q), F.embedding(ids, q.dequantize()))
    rows = q.index_select(0, ids[0])
    assert isinstance(rows, QTensor)
    torch.testing.assert_close(rows.dequantize(), q.dequantize()[ids[0]])
    layer = nn.Embedding(N, K, _weight=repack(q))
    layer.weight.requires_grad_(False)
    torch.testing.assert_close(layer(ids), F.embedding(ids, q.dequantize()))


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [FORMATS["int4"], FORMATS["float8"]], ids=["int4", "float8"])
def test_compile_and_export(spec: Spec) -> None:
    layer, x = nn.Linear(K, N), gaussian((5, K), seed=3)
    layer.weight = nn.Parameter(_weight(spec=spec), requires_grad=False)
    layer.bias.requires_grad_(False)
    expected = layer(x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    wide = x.clone().requires_grad_()
    compiled(wide).sum().backward()
    torch.testing.assert_close(wide.grad, layer.weight.dequantize().sum(0).expand(5, K))
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), expected)
    # other steps are another format: the compiled code is not used for it
    layer.weight = nn.Parameter(_weight((SCALE,), spec), requires_grad=False)
    torch.testing.assert_close(compiled(x), layer(x))
    assert _error(layer(x), expected) < 0.5


def test_inductor() -> None:
    q, x = _weight(spec=FORMATS["int4"]), gaussian((7, K), seed=3)
    compiled = torch.compile(F.linear, fullgraph=True)
    torch.testing.assert_close(compiled(x, q), F.linear(x, q), rtol=1e-4, atol=1e-4)


# -- kernels ---------------------------------------------------------------------------------------


def _fused(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """Takes the steps that it is left with, in another way than ao does."""
    assert all(step.kind in ("scale", "hadamard") for step in w.spec.input)
    return F.linear(x, w.dequantize(x.dtype), bias)


def _refuses_16(call: Call) -> str | None:
    blocks = [step.block for step in call.spec.input if step.block]
    return "has no transform of 4 elements" if 4 in blocks else None


FUSED = Kernel(
    "fused", "linear", "plain", "*", _fused, 60, refuses=_refuses_16, fuses=("scale", "hadamard")
)


def _served(q: QTensor) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    winner = next(iter(ao_core.explain(q, torch.empty(5, K)))).calls[0].winner
    assert winner is not None
    return winner.kernel.name, winner.before, winner.fused


def test_a_kernel_takes_the_last_steps_that_it_knows() -> None:
    x = gaussian((5, K), seed=3)
    cases = {
        ALL: (("permute",), ("scale", "hadamard(8)")),
        STEPS["turned"]: (("hadamard(8)", "scale", "permute"), ()),
        (SCALE,): ((), ("scale",)),
        (PERMUTE,): (("permute",), ()),
        # refused for this block, so asked again for less
        (SCALE, hadamard_step(4)): (("scale", "hadamard(4)"), ()),
        (hadamard_step(4), SCALE): (("hadamard(4)",), ("scale",)),
    }
    with registered(FUSED):
        for steps, split in cases.items():
            q = _weight(steps)
            assert _served(q) == ("fused", *split)
            expected = F.linear(x, q.dequantize())
            torch.testing.assert_close(F.linear(x, q), expected, rtol=1e-5, atol=1e-4)
        text = str(ao_core.explain(_weight()))
    assert "takes the input steps scale, hadamard(8) itself; after the input steps permute" in text
    assert _served(_weight())[0] == "row_scaled"
    assert "after the input steps permute, scale, hadamard(8)" in str(ao_core.explain(_weight()))
    data = ao_core.explain(_weight()).to_dict()["weights"][0]["calls"][0]["candidates"][-1]
    assert data["before"] == ["permute", "scale", "hadamard(8)"]


@pytest.mark.parametrize(
    "op", ["embedding", "error_sums", "mm", "grouped_mm", "quantize", "dequantize"]
)
def test_other_ops_are_served_by_kernels_that_know_the_steps_or_by_none(op: str) -> None:
    spec = replace(FORMATS["int8"], input=ALL)
    call = Call(op, spec, (N, K), (5, K), torch.float32, "cpu")
    takers = {c.kernel.name for c in ao_core.dispatch.candidates(call) if c.refusal is None}
    known = {"embedding": {"reference_embedding"}, "error_sums": {"reference_error_sums"}}
    assert takers == known.get(op, set())
