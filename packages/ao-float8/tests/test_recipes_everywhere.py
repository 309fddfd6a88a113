"""Each recipe of training in each kind of program, against the plain one: the same losses."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from ao_core import ComputeWeight, quantize_
from ao_core.ext import UnsupportedOp, stochastic_rounding
from ao_core.ext.numerics import sqnr
from ao_core.testing.programs import mesh_of_one
from ao_float8 import float8_fallback
from ao_float8.recipes import RECIPES

NAMES = tuple(recipe.name for recipe in RECIPES)
#: whose weights stay in high precision
COMPUTE = tuple(name for name in NAMES if name != "int8_weight_only_training")

#: whose compiled program is that of "float8/mxfp8" but for a few constants; each takes most of a minute
OTHER_ELEMENTS = ("mx_training/mxfp4", "mx_training/mxfp6")


def make(recipe: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """No size is another one, and one weight is taller than wide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 64)).to(dtype)
    quantize_(model, recipe)
    return model


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(48, 96, generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients(model: nn.Module, run: object = None) -> dict[str, Tensor]:
    """The loss, and the gradient of each parameter that has one; `run` calls the model."""
    x = batch(next(p.dtype for p in model.parameters()))
    out = model(x) if run is None else run(model, x)  # type: ignore[operator]
    loss = out.float().square().mean()
    loss.backward()
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(found) >= 2
    model.zero_grad()
    return {"loss": loss.detach(), **found}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def near(a: dict[str, Tensor], b: dict[str, Tensor], decibels: float) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert bool(torch.isfinite(b[name]).all())
        assert float(sqnr(value.float(), b[name].float())) > decibels, name


def step(model: nn.Module, count: int = 3) -> None:
    """Some steps of SGD, which has no state of its own."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    x = batch(next(p.dtype for p in model.parameters()))
    with stochastic_rounding(torch.Generator().manual_seed(0)):
        for _ in range(count):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("recipe", NAMES)
def test_autocast_and_bfloat16_parameters(recipe: str) -> None:
    expected = gradients(make(recipe))

    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)  # type: ignore[no-any-return]

    four_bits = "fp4" in recipe
    near(expected, gradients(make(recipe), run), 8 if four_bits else 12)
    near(expected, gradients(make(recipe, torch.bfloat16)), 8 if four_bits else 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", NAMES)
def test_activations_of_another_dtype(recipe: str, dtype: torch.dtype) -> None:
    """The output has theirs, and gradients that of what they are for; in other words it is the same."""
    weight = make(recipe)[0].weight
    found = []
    for activations in (batch(), batch(dtype)):
        for words in (F.linear, lambda x, w: x @ w.T):
            x = activations.clone().requires_grad_()
            out = words(x, weight)
            out.float().square().mean().backward()
            assert out.dtype == x.grad.dtype == x.dtype
            assert weight.grad.dtype == torch.float32
            found.append({"out": out.detach(), "x": x.grad, "weight": weight.grad})
            weight.grad = None
    same(found[0], found[1])
    same(found[2], found[3])
    near(found[0], found[2], 8 if "fp4" in recipe else 12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", NAMES)
def test_checkpointing(recipe: str, reentrant: bool) -> None:
    model = make(recipe)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        # a reentrant one wants an input with a gradient
        x = x.requires_grad_()
        return checkpoint(model, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    same(gradients(model, lambda m, x: m(x.requires_grad_())), gradients(model, run))


@pytest.mark.parametrize("recipe", NAMES)
def test_functional_call(recipe: str) -> None:
    model = make(recipe)
    parameters = dict(model.named_parameters())
    same(gradients(model), gradients(model, lambda m, x: functional_call(m, parameters, (x,))))


# torch's own formulas of forward mode use what it has deprecated
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("recipe", COMPUTE)
def test_transforms_of_functions(recipe: str) -> None:
    model, x = make(recipe), batch()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.equal(torch.func.grad(loss)(x), leaf.grad)
    out, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    assert torch.equal(out, model(x))
    assert bool(tangent.any())
    rows = {"out": torch.stack([model(row) for row in x[:6]]).detach()}
    near(rows, {"out": torch.func.vmap(model)(x[:6]).detach()}, 12)


@pytest.mark.parametrize("recipe", COMPUTE)
def test_a_matmul_in_other_words(recipe: str) -> None:
    model = make(recipe)[0]
    weight, bias = model.weight, model.bias
    expected = gradients(model)
    for words in (
        lambda x: x @ weight.T + bias,
        lambda x: torch.matmul(x, weight.mT) + bias,
        lambda x: torch.mm(x, weight.t()) + bias,
        lambda x: torch.addmm(bias, x, weight.t()),
        lambda x: F.linear(x, weight, bias),
    ):
        same(expected, gradients(model, lambda _, x, words=words: words(x)))


@pytest.mark.parametrize("recipe", NAMES)
def test_copies(recipe: str) -> None:
    model = make(recipe)
    same(gradients(model), gradients(copy.deepcopy(model)))


@pytest.mark.parametrize("recipe", COMPUTE)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_through_safetensors(recipe: str, assign: bool, tmp_path: Path) -> None:
    model = make(recipe)
    step(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    plain = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 64))
    plain.load_state_dict(state)
    other = make(recipe)
    other.load_state_dict(state, assign=assign)
    assert isinstance(other[0].weight, ComputeWeight)
    same(gradients(model), gradients(other))
    for each in (model, other):
        step(each)
    same(gradients(model), gradients(other))


@pytest.mark.parametrize("recipe", COMPUTE)
def test_averages_of_weights(recipe: str) -> None:
    model = make(recipe)
    first = model[0].weight.detach().clone()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    step(model)
    average.update_parameters(model)
    mean = average.module[0].weight
    assert isinstance(mean, ComputeWeight)
    expected = first.memory.lerp(model[0].weight.detach().memory, 0.1)
    assert torch.allclose(mean.detach().memory, expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in NAMES if name not in OTHER_ELEMENTS])
def test_compiled(recipe: str) -> None:
    torch.compiler.reset()
    model = make(recipe)
    expected = gradients(model)
    compiled = torch.compile(model, fullgraph=True)
    near(expected, gradients(model, lambda _, x: compiled(x)), 25)


@pytest.mark.parametrize("recipe", COMPUTE)
def test_converted_without_values(recipe: str) -> None:
    """Meta, convert, memory, values: the order of programs that shard before they have memory."""
    expected = make(recipe)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 64))
    quantize_(model, recipe)
    model.to_empty(device="cpu")
    model.load_state_dict(expected.state_dict())
    same(gradients(expected), gradients(model))


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("recipe", COMPUTE)
@pytest.mark.parametrize("sharded", [False, True])
def test_initialized_after_the_conversion(recipe: str, sharded: bool, tmp_path: Path) -> None:
    """Meta, convert, shard, memory, init: the order of torchtitan."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 64))
    quantize_(model, recipe)
    with mesh_of_one(tmp_path) if sharded else nullcontext() as mesh:
        if sharded:
            fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for layer in (model[0], model[2]):
            layer.reset_parameters()
        whole = [p.full_tensor() if sharded else p for p in model.parameters()]
        expected = make(recipe)
        assert all(torch.equal(a, b) for a, b in zip(whole, expected.parameters(), strict=True))
        assert torch.equal(model(batch()), expected(batch()))


def test_memory_is_that_of_the_weight() -> None:
    weight = make("float8/rowwise")[0].weight.detach()
    assert weight.data_ptr() == weight.memory.data_ptr()
    assert weight.untyped_storage().data_ptr() == weight.memory.data_ptr()
    assert weight[8:].storage_offset() == 8 * 96
    assert weight.numpy().shape == (160, 96)
    assert weight.share_memory_().is_shared()
    weight.data = torch.zeros(160, 96)
    assert not weight.memory.any()
    with pytest.raises(UnsupportedOp, match="resize_"):
        weight.resize_(3, 3)


def test_layers_stay_in_high_precision_when_loaded(tmp_path: Path) -> None:
    model = make("float8/rowwise")
    float8_fallback(model, "0")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = make("float8/rowwise")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other[0].weight.matmuls == (None, None, None)
    assert other[2].weight.matmuls == model[2].weight.matmuls != (None, None, None)


def test_the_generator_is_of_its_thread() -> None:
    model = make("int8_weight_only_training")
    said = []

    def other() -> None:
        try:
            model[0].weight.detach().add_(1.0)
        except UnsupportedOp as error:
            said.append(str(error))

    with stochastic_rounding(torch.Generator().manual_seed(0)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "without a generator" in said[0]
