"""Matmuls with the 3-D weights of experts: grouped and batched, both ways, traced, and without copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ao_core
from ao_core import Call, Kernel, Layout, QTensor, Spec, quantize_, quantize_tensor
from ao_core.errors import UnsupportedOp
from ao_core.recipes import WeightOnlyConfig
from ao_core.registry import registry
from ao_core.tensor import repack, to_layout

SPECS = {
    "int8": Spec("int8", (1, ao_core.WHOLE)),
    "int4": Spec("int4", (1, 32), "bfloat16", layout="packed"),
    "uint4": Spec("uint4", (1, 16), "bfloat16", "int", "packed"),
    "nf4 double": Spec("nf4", (1, 64), Spec("f8e4m3", (ao_core.WHOLE, ao_core.WHOLE)), layout="packed"),
    "dynamic": Spec("int8", (1, ao_core.WHOLE), act=Spec("int8", (1, ao_core.WHOLE))),
    # codes of experts that cannot be taken apart
    "flat": Spec("int3", (32,), layout="flat"),
}  # fmt: skip
WEIGHT_ONLY = [name for name in SPECS if name != "dynamic"]
E, N, K = 4, 33, 70


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weight(name: str, shape: tuple[int, ...] = (E, N, K)) -> QTensor:
    return quantize_tensor(_randn(*shape), SPECS[name])


def _by_hand(x: Tensor, dense: Tensor, ends: list[int]) -> Tensor:
    """Rows of x by the dense (E, K, N) of their expert, in float64; the others 0."""
    out, start = x.new_zeros(x.shape[0], dense.shape[-1]).double(), 0
    for expert, end in enumerate(ends):
        out[start:end] = x[start:end].double() @ dense[expert].double()
        start = end
    return out


def _near(actual: Tensor, expected: Tensor, rtol: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    assert float((actual - expected).norm()) <= rtol * float(expected.norm())


@pytest.fixture
def registered() -> Iterator[Any]:
    """Records that do not outlive the test."""
    kernels, layouts = dict(registry.kernels._records), dict(registry.layouts._records)
    ao_core.reopen()
    yield ao_core.register
    for table, before in ((registry.kernels, kernels), (registry.layouts, layouts)):
        table._records.clear()
        table._records.update(before)
    registry.reopen()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("ends", [[3, 3, 9, 12], [0, 0, 0, 5], [1, 2, 3, 4], [0, 0, 0, 0]])
def test_grouped(name: str, ends: list[int]) -> None:
    w, x = _weight(name), _randn(12, K, seed=1)
    offs = torch.tensor(ends, dtype=torch.int32)
    y = torch._grouped_mm(x, w.transpose(-2, -1), offs)
    expected = _by_hand(x, w.dequantize().transpose(-2, -1), ends)
    _near(y, expected, 0.02 if name == "dynamic" else 1e-5)
    assert y[ends[-1] :].eq(0).all()
    assert y.dtype == x.dtype


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize("how", [torch.bmm, torch.matmul, torch._grouped_mm])
@pytest.mark.parametrize("grad", [False, True])
def test_batched(name: str, how: Any, grad: bool) -> None:
    w, x = _weight(name), _randn(E, 5, K, seed=1)
    expected = torch.bmm(x, w.dequantize().mT)
    with torch.inference_mode(not grad):
        _near(how(x, w.mT), expected)
        _near(how(x[:, :0], w.mT), expected[:, :0])


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_weights_either_way_and_gradients(name: str, transposed: bool, grouped: bool) -> None:
    """Weights (E, out, in), and (E, in, out) as some models keep them; the gradient is the other way."""
    w = _weight(name, (E, N, K) if transposed else (E, K, N))
    logical = w.mT if transposed else w
    x = _randn(12, K, seed=1) if grouped else _randn(E, 3, K, seed=1)
    x.requires_grad_()
    ends = [3, 3, 9, 12]
    offs = torch.tensor(ends, dtype=torch.int32)
    y = torch._grouped_mm(x, logical, offs) if grouped else torch.bmm(x, logical)
    dense = logical.dequantize()
    weights = _randn(*y.shape, seed=2)
    (y * weights).sum().backward()
    assert x.grad is not None
    if grouped:
        _near(y, _by_hand(x, dense, ends))
        _near(x.grad, _by_hand(weights, dense.mT, ends))
    else:
        _near(y, torch.bmm(x, dense))
        _near(x.grad, torch.bmm(weights, dense.mT))


@pytest.mark.parametrize("grouped", [True, False])
def test_never_all_experts_at_once(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    decode = ao_core.tensor.qtensor.decode_parts

    def watched(parts: Any, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        shapes.append(shape)
        return decode(parts, spec, shape, dtype)

    monkeypatch.setattr("ao_core.tensor.qtensor.decode_parts", watched)
    w = _weight("int4")
    x = (_randn(12, K, seed=1) if grouped else _randn(E, 3, K, seed=1)).requires_grad_()
    offs = torch.tensor([3, 3, 9, 12], dtype=torch.int32)
    y = torch._grouped_mm(x, w.mT, offs) if grouped else torch.bmm(x, w.mT)
    forward = len(shapes)
    y.sum().backward()
    # an expert without rows is not decoded
    assert (forward, len(shapes)) == ((3, 6) if grouped else (4, 8))
    assert set(shapes) == {(N, K)}


def test_the_table_decides(registered: Any) -> None:
    calls = []

    def fn(x: Tensor, w: QTensor, offs: Tensor | None) -> Tensor:
        calls.append((tuple(x.shape), tuple(w.shape), w.is_permuted, offs))
        return x.new_zeros(*x.shape[:-1], w.shape[1])

    def refuses(call: Call) -> str | None:
        assert (call.op, call.weight_shape) == ("grouped_linear", (E, N, K))
        return None if call.x_dtype == torch.float32 else "takes float32 activations only"

    registered(Kernel("mine", "grouped_linear", "packed", "cpu", fn, 60, refuses=refuses))
    w, offs = _weight("int4"), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    torch._grouped_mm(_randn(4, K), w.mT, offs)
    torch.bmm(_randn(E, 2, K), w.mT)
    assert [call[:3] for call in calls] == [
        ((4, K), (E, N, K), False),
        ((E, 2, K), (E, N, K), False),
    ]
    assert calls[0][3] is offs
    assert calls[1][3] is None
    assert torch.bmm(_randn(E, 2, K).double(), w.mT).abs().sum() > 0
    with ao_core.kernels("reference"):
        assert torch.bmm(_randn(E, 2, K), w.mT).abs().sum() > 0
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("x", "offs", "message"),
    [
        (_randn(4, K), [1, 2, 3], r"offs of shape \(3,\).*4 experts"),
        (_randn(4, K), [1, 2, 3, 5], r"offs=\[1, 2, 3, 5\].*4 rows"),
        (_randn(4, K), [2, 1, 3, 4], r"must not decrease"),
        (_randn(4, K), [-1, 1, 3, 4], r"must not decrease"),
        (_randn(4, K - 1), [1, 2, 3, 4], r"\(4, 69\) does not fit"),
        (_randn(3, 2, K), None, r"\(3, 2, 70\) does not fit"),
    ],
)
def test_wrong_arguments_are_named(x: Tensor, offs: list[int] | None, message: str) -> None:
    ends = None if offs is None else torch.tensor(offs, dtype=torch.int32)
    with pytest.raises(UnsupportedOp, match=message):
        torch._grouped_mm(x, _weight("int8").mT, ends)


def test_other_matmuls_are_dense() -> None:
    w, x = _weight("int8"), _randn(E, 5, K, seed=1)
    dense = w.dequantize()
    torch.testing.assert_close(torch.bmm(w, x.mT), torch.bmm(dense, x.mT))
    torch.testing.assert_close(x[0] @ w.mT, x[0] @ dense.mT)
    torch.testing.assert_close(x[:, None] @ w.mT, x[:, None] @ dense.mT)
    one, batch = quantize_tensor(_randn(1, N, K), SPECS["int8"]), _randn(3, 5, K)
    torch.testing.assert_close(batch @ one.mT, batch @ one.dequantize().mT)
    bfloat16, offs = x[0].bfloat16()[:, :64], torch.tensor([1, 2, 3, 5], dtype=torch.int32)
    half = quantize_tensor(_randn(E, 32, 64).bfloat16(), SPECS["int8"])
    y = F.grouped_mm(bfloat16, half.mT, offs=offs, out_dtype=torch.bfloat16)
    assert y.dtype == torch.bfloat16


def _grouped(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(x, w.transpose(-2, -1), offs)


def _batched(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x, w.transpose(-2, -1))


def test_compiles() -> None:
    w = quantize_tensor(_randn(E, 32, 64).bfloat16(), SPECS["int4"])
    offs = torch.tensor([3, 3, 9, 11], dtype=torch.int32)
    x = _randn(12, 64, seed=1).bfloat16()
    torch._dynamo.reset()
    compiled: Any = torch.compile(_grouped, fullgraph=True, backend="aot_eager")
    y = compiled(x, w, offs)
    _near(y, _grouped(x, w, offs), 1e-2)
    assert y[11:].eq(0).all()
    compiled = torch.compile(_batched, fullgraph=True, backend="aot_eager")
    ragged, batch = _weight("uint4"), _randn(E, 3, K, seed=1)
    _near(compiled(batch, ragged), _batched(batch, ragged))
    batch.requires_grad_()
    compiled(batch, ragged).sum().backward()
    assert batch.grad is not None
    _near(batch.grad, ragged.dequantize().sum(1, keepdim=True).expand(E, 3, K))
    torch._dynamo.reset()


def test_export() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(_weight("int4"), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return _batched(x, self.w)

    model, x = Experts(), _randn(E, 3, K, seed=1)
    program = torch.export.export(model, (x,))
    _near(program.module()(x), model(x))


@pytest.mark.parametrize("grouped", [True, False])
def test_autocast(grouped: bool) -> None:
    w = quantize_tensor(_randn(E, 32, 64), SPECS["int4"])
    x = _randn(12, 64, seed=1) if grouped else _randn(E, 3, 64, seed=1)
    offs = torch.tensor([3, 6, 9, 12], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        y = _grouped(x, w, offs) if grouped else _batched(x, w)
    _near(y, torch.bmm(x.view(E, 3, 64), w.dequantize().mT).reshape(y.shape), 2e-2)


# -- a layout for the kernel of experts ------------------------------------------------------------


class Swapped(Layout):
    """As `packed`, with the bytes of every row in reverse order."""

    name = "swapped"
    canonical = False
    canonical_name = "packed"
    auto_devices = ("cpu",)
    stacked = True

    def from_canonical(self, parts: Any, spec: Any, shape: Any, dtype: Any) -> Any:
        return {**parts, "qdata": parts["qdata"].flip(-1)}

    to_canonical = from_canonical


def _swapped_linear(x: Tensor, w: QTensor, offs: Tensor | None) -> Tensor:
    return ao_core.torch_kernels.reference.grouped_linear(x, w, offs)


def test_native_layout_for_the_weights_of_experts(registered: Any) -> None:
    registered(Swapped())
    registered(
        Kernel("swapped", "grouped_linear", "swapped", "cpu", _swapped_linear, 60,
               refuses=lambda call: None if call.m < 100 else "is for fewer rows")
    )  # fmt: skip
    w = _weight("int4")
    assert repack(w).spec.layout == "swapped"
    assert repack(_weight("int4", (N, K))).spec.layout != "swapped"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(_randn(E, N, 64))
            self.conv = nn.Conv1d(64, 32, 3)

    model = Model()
    report = quantize_(model, WeightOnlyConfig("int4", 32))
    assert model.experts.spec.layout == "swapped"
    assert {r.fqn: r.kernel for r in report.with_status("changed")} == {
        "experts": "swapped",
        "conv.weight": "",  # of three dimensions too, and not cut into experts
    }
    (experts, conv) = ao_core.explain(model, _randn(2, 3, 64))
    assert [(c.op, c.x_shape) for c in experts.calls] == [("grouped_linear", (6, 64))]
    assert conv.calls == ()
    moved = model.experts.to("cpu", torch.bfloat16)
    assert moved.spec.layout == "swapped"


def test_stacked_layouts_give_experts_without_conversion(
    registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(Swapped())
    w = to_layout(_weight("int4"), "swapped")
    dense = w.dequantize()
    monkeypatch.setattr(Swapped, "to_canonical", None)
    for expert, piece in enumerate(w.unbind(0)):
        assert piece.spec == replace(w.spec, block=(1, 32))
        assert piece.qdata.data_ptr() == w.qdata[expert].data_ptr()
    monkeypatch.undo()
    assert torch.equal(w[2].dequantize(), dense[2])
    assert torch.equal(w.mT[2].dequantize(), dense[2].t())
    x = _randn(3, K)
    _near(F.linear(x, w[1]), x @ dense[1].t())
    assert torch.equal(w[:, 3].dequantize(), dense[:, 3])
    w[1].copy_(w[2])
    assert torch.equal(w.dequantize()[1], dense[2])
    _near(_batched(_randn(E, 2, K), w), torch.bmm(_randn(E, 2, K), w.dequantize().mT))


def test_writing_a_slice_that_shares_its_scale_is_refused(registered: Any) -> None:
    shared = Spec("int4", (ao_core.WHOLE, 1, ao_core.WHOLE), layout="packed")

    class Repeated(Swapped):
        name = "repeated"

        def from_canonical(self, parts: Any, spec: Any, shape: Any, dtype: Any) -> Any:
            return {**parts, "scale": parts["scale"].repeat(shape[0], 1, 1)}

        def to_canonical(self, parts: Any, spec: Any, shape: Any, dtype: Any) -> Any:
            scale = parts["scale"]
            return {**parts, "scale": scale[:1] if len(shape) == 3 else scale}

    registered(Repeated())
    w = to_layout(quantize_tensor(_randn(E, N, K), shared), "repeated")
    assert torch.equal(w[1].dequantize(), w.dequantize()[1])
    with pytest.raises(UnsupportedOp, match="'scale' is shared"):
        w[1].copy_(torch.ones(N, K))
