"""What ordinary torch programs do to quantized tensors works, or says why not; it never is silently wrong."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad as gradient
from torch.func import hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.compute import ComputeWeight
from ao_core.errors import DequantizeWarning, QuantizationError, StorageError, UnsupportedOp
from ao_core.numerics import sqnr
from ao_core.quantize import sample_sqnr
from ao_core.tensor.described import describe, undescribe

ROW = Spec("int8", (1, WHOLE), "bfloat16")
WEIGHT_ONLY = {
    "int8": ROW,
    "int4": Spec("int4", (1, 32), "bfloat16", layout="packed"),
    "float8": Spec("f8e4m3", (1, WHOLE)),
}
DYNAMIC = {
    "int8 row": Spec("int8", (1, WHOLE), act=Spec("int8", (1, WHOLE))),
    "float8 row": Spec("f8e4m3", (1, WHOLE), act=Spec("f8e4m3", (1, WHOLE))),
    "float8 tensor": Spec("f8e4m3", (WHOLE, WHOLE), act=Spec("f8e4m3", (WHOLE, WHOLE))),
}
ALL = WEIGHT_ONLY | DYNAMIC


def _values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _weight(spec: Spec) -> QTensor:
    return quantize_tensor(_values(32, 64), spec)


def _layer(spec: Spec) -> nn.Linear:
    layer = nn.Linear(64, 32)
    layer.weight = nn.Parameter(_weight(spec), requires_grad=False)
    return layer


def _is_close(a: Tensor, b: Tensor, bound: float) -> bool:
    return bool((a - b).norm() <= bound * b.norm())


def _check(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert _is_close(actual, expected, 1e-5)


# -- assignment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_data_takes_dense_values_and_their_dtype(spec: Spec) -> None:
    weight, new = _layer(spec).weight, _values(32, 64, seed=1).bfloat16()
    weight.data = new
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.dequantize(), quantize_tensor(new, spec).dequantize())


def test_data_takes_a_quantized_tensor_as_it_is() -> None:
    weight, other = _layer(ROW).weight, _weight(WEIGHT_ONLY["int4"])
    weight.data = other
    assert weight.spec == other.spec
    assert weight.qdata.data_ptr() == other.qdata.data_ptr()
    assert torch.equal(weight.dequantize(), other.dequantize())


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (torch.zeros(32, 8, 8), UnsupportedOp),
        (torch.zeros(32, 64, dtype=torch.int64), UnsupportedOp),
        (torch.full((32, 64), torch.nan), QuantizationError),
        (3, TypeError),
    ],
)
def test_data_refuses_other_values(value: object, error: type[Exception]) -> None:
    weight = _layer(ROW).weight
    before = weight.dequantize()
    with pytest.raises(error, match=r"\.data"):
        weight.data = value
    assert weight.shape == (32, 64)
    assert torch.equal(weight.dequantize(), before)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_data_takes_another_shape(spec: Spec, transposed: bool) -> None:
    """Of a parameter that modules share, which a bigger vocabulary is assigned to."""
    weight, new, x = _layer(spec).weight, _values(48, 96, seed=1), _values(3, 96, seed=2)
    expected = quantize_tensor(new, spec)
    target = weight.t() if transposed else weight
    target.data = new.t() if transposed else new
    assert target.shape == target.dequantize().shape == ((96, 48) if transposed else (48, 96))
    rows = target.t() if transposed else target
    assert torch.equal(rows.dequantize(), expected.dequantize())
    assert _is_close(F.linear(x, rows), F.linear(x, expected), 1e-5)


def test_data_of_a_flat_view_keeps_its_shape() -> None:
    flat = _weight(ROW).view(-1)
    with pytest.raises(UnsupportedOp, match="flat view"):
        flat.data = torch.zeros(64)
    flat.data = torch.zeros(32 * 64)
    assert not flat.dequantize().any()


def test_a_vector_is_written_to_all_parameters() -> None:
    layer = _layer(ROW)
    vector = _values(32 * 64 + 32, seed=2)
    vector_to_parameters(vector, layer.parameters())
    assert _is_close(layer.weight.dequantize().flatten(), vector[: 32 * 64], 0.01)
    assert torch.equal(layer.bias, vector[32 * 64 :])


def test_data_of_a_weight_that_is_cast() -> None:
    weight, new = ComputeWeight(_values(32, 64), ROW), _values(32, 64, seed=1)
    weight.data = new
    assert torch.equal(weight.memory, new)
    weight.data = new.t()
    assert weight.shape == weight.memory.shape == (64, 32)
    with pytest.raises(UnsupportedOp, match="shape"):
        weight.data = new.view(-1)


def test_copies_of_nan_are_refused() -> None:
    weight = _weight(ROW)
    before = weight.dequantize()
    with pytest.raises(QuantizationError, match="NaN"):
        weight.copy_(torch.full((32, 64), torch.inf))
    assert torch.equal(weight.dequantize(), before)


# -- memory ----------------------------------------------------------------------------------------


def test_memory_is_shared() -> None:
    layer = _layer(WEIGHT_ONLY["int4"])
    before = layer.weight.dequantize()
    layer.share_memory()
    assert layer.weight.is_shared()
    assert all(leaf.is_shared() for _, leaf in layer.weight.leaves())
    assert torch.equal(layer.weight.dequantize(), before)


@pytest.mark.parametrize(
    "use",
    [
        torch.from_dlpack,
        lambda w: w.numpy(),
        lambda w: w.tolist(),
        lambda w: w.apply_(abs),
        lambda w: w.map_(w, max),
        lambda w: w.__array__(),
    ],
)
def test_addresses_are_refused(use: Callable[[Tensor], object]) -> None:
    with pytest.raises(UnsupportedOp, match="no memory of its own"):
        use(_weight(ROW))


@pytest.mark.parametrize("spec", WEIGHT_ONLY.values(), ids=WEIGHT_ONLY)
def test_other_programs_do_not_write_what_they_find_at_an_address(spec: Spec) -> None:
    """`data_ptr` tells tensors apart; what is behind it is shorter than the logical dtype and shape say."""
    state = _layer(spec).state_dict()
    with pytest.raises(StorageError, match=r"ao_core\.save_model"):
        safetensors.torch.save(state)


def test_state_without_values_is_zeros() -> None:
    for spec in WEIGHT_ONLY.values():
        layer = _layer(spec).to_empty(device="cpu")
        assert (layer.weight.dequantize() == 0).all()


# -- ops without a rule ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        lambda w: w.std(),
        lambda w: w.max(1).values,
        lambda w: w > 0,
        lambda w: w.clamp(-1, 1),
        lambda w: torch.where(w > 0, w, 0.0),
        lambda w: w.masked_fill(w > 0, 0.0),
        lambda w: torch.ones_like(w),
        lambda w: w.index_copy(0, torch.tensor([1]), torch.zeros(1, 64)),
        lambda w: w.mean(0),
        lambda w: torch.linalg.svdvals(w),
        lambda w: torch.linalg.qr(w).R,
    ],
)
def test_functional_ops_are_those_of_the_values(op: Callable[[Tensor], Tensor]) -> None:
    weight = _weight(ROW)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DequantizeWarning)
        torch.testing.assert_close(op(weight), op(weight.dequantize()))


def test_an_op_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ao_core.tensor.tables._warned", set())
    with pytest.warns(DequantizeWarning, match="aten.erf"):
        torch.erf(_weight(ROW))
    torch.erf(_weight(ROW))  # warnings are errors here


@pytest.mark.parametrize("op", ["clamp_", "normal_", "uniform_", "index_fill_", "diagonal"])
def test_other_writes_and_views_are_refused(op: str) -> None:
    weight = _weight(ROW)
    before = weight.dequantize()
    args = {"clamp_": (0,), "index_fill_": (0, torch.tensor([0]), 1.0)}.get(op, ())
    with pytest.raises(UnsupportedOp, match=op):
        getattr(weight, op)(*args)
    assert torch.equal(weight.dequantize(), before)


def test_averages_in_lists() -> None:
    weights, new = [_weight(ROW), _values(3)], [_values(32, 64, seed=1), _values(3, seed=1)]
    expected = [w.dequantize().lerp(n, 0.5) for w, n in zip(weights[:1], new, strict=False)]
    torch._foreach_lerp_(weights, new, 0.5)
    assert _is_close(weights[0].dequantize(), expected[0], 0.01)
    torch._foreach_copy_(weights, new)
    assert _is_close(weights[0].dequantize(), new[0], 0.01)
    assert torch.equal(weights[1], new[1])


# -- activations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_activations_are_floating_point(spec: Spec, dtype: torch.dtype) -> None:
    weight, x = _weight(spec), torch.ones(2, 64, dtype=dtype)
    for matmul in (lambda: F.linear(x, weight), lambda: x @ weight.t()):
        with pytest.raises(UnsupportedOp, match="floating-point"):
            matmul()
    with pytest.raises(UnsupportedOp, match="ids"):
        F.embedding(torch.ones(2), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", WEIGHT_ONLY.values(), ids=WEIGHT_ONLY)
def test_slices_multiply(spec: Spec, dtype: torch.dtype) -> None:
    weight = quantize_tensor(_values(64, 128).to(dtype), spec)
    slices = (weight[:, :64], weight.narrow(1, 64, 64), weight.chunk(2, 1)[1], weight[:32, 64:])
    for piece in slices:
        assert not piece.is_contiguous()
        assert piece.contiguous().is_contiguous()
        for rows in (1, 8, 9):
            x = _values(rows, 64).to(dtype)
            expected = x.float() @ piece.dequantize().float().t()
            assert _is_close(F.linear(x, piece).float(), expected, 0.02)
            assert _is_close((x @ piece.t()).float(), expected, 0.02)


# -- derivatives -----------------------------------------------------------------------------------


# forward-mode derivatives make torch 2.13 use what it has itself deprecated
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("spelling", ["linear", "matmul"])
@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_transforms(spec: Spec, spelling: str) -> None:
    weight, bias = _weight(spec), _values(32, seed=3)
    dense, x, tangent = weight.dequantize(), _values(5, 64, seed=4), _values(5, 64, seed=5)

    def layer(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias) if spelling == "linear" else x @ weight.t() + bias

    def loss(x: Tensor) -> Tensor:
        return layer(x).square().sum()

    out, found = jvp(layer, (x,), (tangent,))
    _check(out, layer(x))
    _check(found, tangent @ dense.t())
    with forward_ad.dual_level():
        dual = layer(forward_ad.make_dual(x, tangent))
        _check(forward_ad.unpack_dual(dual).tangent, tangent @ dense.t())
    each = torch.stack([layer(row) for row in x])
    _check(vmap(layer)(x), each)
    _check(vmap(gradient(loss))(x), 2 * each @ dense)
    _check(jacfwd(layer)(x[0]), dense)
    _check(jacrev(layer)(x[0]), dense)
    _check(hessian(loss)(x[0]), 2 * dense.t() @ dense)


def test_what_a_transform_has_left() -> None:
    weight, bias, x = _weight(ROW), torch.zeros(32, requires_grad=True), _values(5, 64)
    left: list[Tensor] = []
    gradient(lambda x: (left.append(x), x.sum())[1])(x)
    out = F.linear(left[0], weight, bias)
    assert torch.equal(out, F.linear(x, weight))
    out.sum().backward()
    assert torch.equal(bias.grad, torch.full((32,), 5.0))


# -- reports ---------------------------------------------------------------------------------------


def test_the_module_says_that_it_is_quantized() -> None:
    layer = _layer(ROW)
    plain = repr(layer)
    describe(layer)
    text = repr(layer)
    assert "weight=int8[1×*]" in text
    copied, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    assert type(layer) is nn.Linear
    for other in (copied, pickled):
        assert repr(other) == text
        other.weight = nn.Parameter(torch.zeros(32, 64))
        assert repr(other) == plain
    assert repr(layer) == text
    undescribe(layer)
    assert repr(layer) == plain


def test_quality_of_experts_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ao_core.quantize._SQNR_ELEMENTS", 1 << 12)
    dense = _values(4, 64, 64)
    dense[0, :, 0] *= 100.0  # the first expert is much worse than the others
    new = quantize_tensor(dense, ROW)
    assert abs(sample_sqnr(dense, new) - float(sqnr(dense, new.dequantize()))) < 0.5
    assert len(parameters_to_vector([dense])) == dense.numel()
