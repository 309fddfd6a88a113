"""A mask is searched for once while the weight stays, and again after whatever changed the weight."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ao_core.testing.base import gaussian
from ao_sparsity import SemiSparseLinear, tile_mask
from ao_sparsity.train import kernels, known

SIZES = [(35, 22), (12, 7), (16, 24), (5, 3)]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights whose masks were searched for."""
    seen: list[Tensor] = []
    search = kernels.tile_mask

    def counted(weight: Tensor) -> Tensor:
        seen.append(weight)
        return search(weight)

    monkeypatch.setattr(kernels, "tile_mask", counted)
    return seen


def make(size: tuple[int, int] = SIZES[0], dtype: torch.dtype = torch.float32) -> SemiSparseLinear:
    layer = SemiSparseLinear(size[1], size[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(gaussian(size, seed=1))
    return layer.to(dtype)


def is_right(layer: SemiSparseLinear) -> bool:
    expected = torch.where(tile_mask(layer.weight), layer.weight, 0)
    with torch.no_grad():
        seen = layer(torch.eye(layer.in_features, dtype=layer.weight.dtype)).t()
    return torch.equal(seen, expected) and torch.equal(layer.effective_weight(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_one_search_while_the_weight_stays(
    size: tuple[int, int], dtype: torch.dtype, searched: list[Tensor]
) -> None:
    layer, x = make(size, dtype), gaussian((3, size[1])).to(dtype)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    layer(x).sum().backward()
    with torch.no_grad():
        layer.eval()(x)
    layer.effective_weight()
    assert len(searched) == 1
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        layer(x)
    assert len(searched) == 1


def optimize(layer: SemiSparseLinear) -> None:
    layer(gaussian((3, 22))).square().sum().backward()
    torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True).step()


def load(layer: SemiSparseLinear, assign: bool = False) -> None:
    layer.load_state_dict({"weight": gaussian((35, 22), seed=2)}, assign=assign)


def write_data(layer: SemiSparseLinear, other: Tensor) -> None:
    layer.weight.data = other


def swap_rows(layer: SemiSparseLinear) -> None:
    layer.weight.data.copy_(layer.weight.data.flip(0))


WRITES: dict[str, Callable[[SemiSparseLinear], Any]] = {
    "in place": lambda layer: layer.weight.data.mul_(gaussian((35, 22), seed=3)),
    "a step": optimize,
    "load": load,
    "assign": lambda layer: load(layer, assign=True),
    "data": lambda layer: write_data(layer, gaussian((35, 22), seed=4)),
    "rows": swap_rows,
    "one element": lambda layer: layer.weight.data[4].mul_(3.0),
    "memory": lambda layer: layer.weight.detach().numpy().fill(2.0),
    "init": lambda layer: nn.init.normal_(layer.weight),
    "nan": lambda layer: layer.weight.data[3, 4].fill_(float("nan")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_changes_the_weight_changes_the_mask(write: Callable[..., Any]) -> None:
    layer = make()
    layer(gaussian((3, 22)))
    write(layer)
    if bool(layer.weight.isfinite().all()):
        assert is_right(layer)
    else:
        assert layer(torch.ones(1, 22)).isnan().any()


def test_other_weights_for_a_call() -> None:
    layer, other = make(), gaussian((35, 22), seed=5)
    x = torch.eye(22)
    layer(x)
    found = functional_call(layer, {"weight": other}, (x,))
    assert torch.equal(found.t(), torch.where(tile_mask(other), other, 0))
    assert is_right(layer)


def test_a_mask_of_inference_serves_training() -> None:
    layer, x = make(), gaussian((3, 22))
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_transformed_and_compiled_calls_search_by_themselves() -> None:
    layer, x = make(), gaussian((3, 22))
    expected = layer(x)
    torch.testing.assert_close(vmap(layer)(x), expected)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()


def test_copies_have_no_mask() -> None:
    layer = make()
    layer(gaussian((3, 22)))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert "_known" not in vars(other)
        assert is_right(other)
    assert isinstance(layer._known, known.Known)
    layer.to_dense()
    assert "_known" not in vars(layer)
