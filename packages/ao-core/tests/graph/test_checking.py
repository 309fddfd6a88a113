"""A change is proven before a parameter is written; labels; models that cannot be traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_models import Decoder, Gated, ids, normals, randomized
from torch import Tensor, nn

from ao_core.errors import AoError, GraphError
from ao_core.graph import analyze, prove, relative_difference, scaled, tensors_of
from ao_core.graph.labels import Labels, compact


def x() -> Tensor:
    return normals(3, 4, 12).float()


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}


def doubled(tensors: Any) -> dict[str, Tensor]:
    return {"down.weight": tensors["down.weight"].detach() * 2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_change_of_the_outputs_is_refused(dtype: torch.dtype) -> None:
    model = randomized(Gated()).to(dtype)
    before = copies(model)
    with pytest.raises(GraphError, match=r"^twice: .* differ by 0\.\d+ of their norm, where 1e-05"):
        prove(model, x().to(dtype), doubled, what="twice")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(model).items())
    assert issubclass(GraphError, AoError)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_proven_is_written_in_place(dtype: torch.dtype) -> None:
    model = randomized(Gated()).to(dtype).train()
    (group,) = analyze(model, x().to(dtype)).scale_groups
    objects, before = dict(model.named_parameters()), copies(model)
    scales = torch.linspace(0.5, 3, group.size)
    error = prove(model, x().to(dtype), lambda t: scaled(t, group, scales), what=group.name)
    assert error < (1e-12 if dtype == torch.float64 else 1e-6)
    assert dict(model.named_parameters()) == objects
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert {n for n, t in tensors_of(model).items() if not torch.equal(t, before[n])} == {
        *("up.weight", "up.bias", "down.weight")
    }
    wanted = before["up.weight"].double() / scales.double()[:, None]
    assert torch.equal(model.up.weight, wanted.to(dtype))


def test_tied_parameters_stay_tied() -> None:
    model = randomized(Decoder(tied=True))
    group = analyze(model, ids()).scale_groups[0]
    prove(model, ids(), lambda t: scaled(t, group, torch.full((group.size,), 2.0)), what="it")
    assert model.head.weight is model.embed.weight


def test_a_transform_that_raises_changes_nothing() -> None:
    model = randomized(Gated())
    before = copies(model)

    def broken(tensors: Any) -> dict[str, Tensor]:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        prove(model, x(), broken, what="it")
    for wrong in ({"nothing": torch.ones(1)}, {"down.weight": torch.ones(1)}):
        with pytest.raises(GraphError, match="the model has no tensor"):
            prove(model, x(), lambda t, w=wrong: w, what="it")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(model).items())


def test_outputs_that_cannot_be_compared() -> None:
    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Gated()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x).argmax(-1)

    model = Largest()
    same = {"mlp.down.weight": model.mlp.down.weight.detach()}
    with pytest.raises(GraphError, match="no outputs that could be compared"):
        prove(model, x(), lambda t: same, what="it")
    with pytest.raises(GraphError, match="differ by nan"):
        prove(Gated(), x() * torch.nan, lambda t: {}, what="it")


def test_relative_difference() -> None:
    one = torch.tensor([3.0, 4.0, torch.inf])
    assert relative_difference([one], [one.clone()]) == 0
    assert relative_difference([one], [one + torch.tensor([0.0, 0.5, 0.0])]) == pytest.approx(0.1)
    assert relative_difference([torch.zeros(2)], [torch.ones(2)]) > 1e5


def test_a_model_that_cannot_be_traced_says_so() -> None:
    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(GraphError, match=r"torch\.export cannot trace Loop with them"):
        analyze(Loop(), x())


def test_labels_are_equal_opposite_or_zero() -> None:
    labels = Labels(9)
    labels.unify(torch.tensor([[1], [2]]), torch.tensor([[-3, -4], [5, 6]]))
    assert labels.find(torch.tensor([3, 4, -1])).unique().numel() == 1
    assert labels.find(torch.tensor([5, 6, 2])).unique().numel() == 1
    labels.require_positive(torch.tensor([4]))
    labels.unify(torch.tensor(7), torch.tensor(-7))
    assert labels.find(torch.tensor([7, 0])).tolist() == [0, 0]
    labels.unify(torch.tensor([8]), torch.tensor([0]))
    assert labels.find(torch.tensor(8)) == 0
    assert labels.positive.tolist() == [False, True, *[False] * 8]
    labels.zero(torch.tensor([-4]))
    assert not labels.find(torch.tensor([1, 3, 4])).any()
    assert labels.find(torch.tensor([9, -9])).tolist() == [9, -9]


def test_labels_against_a_solver() -> None:
    """Random equations ±a = ±b: an unknown is 0 where the null space is, and so on for pairs."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        labels, rows = Labels(12), []
        for _ in range(9):
            a, b = (torch.randint(1, 13, (2,), generator=generator)).tolist()
            sign = 1 if torch.rand((), generator=generator) < 0.7 else -1
            labels.unify(torch.tensor([a]), torch.tensor([sign * b]))
            row = torch.zeros(12, dtype=torch.float64)
            row[a - 1] += 1
            row[b - 1] -= sign
            rows.append(row)
        free = torch.linalg.svd(torch.stack(rows))
        rank = int((free.S > 1e-9).sum())
        space = free.Vh[rank:]
        roots = labels.find(torch.arange(1, 13))
        for i in range(12):
            assert (roots[i] == 0) == (space[:, i].norm() < 1e-9)
            for j in range(12):
                equal = (space[:, i] - space[:, j]).norm() < 1e-9
                assert (roots[i] == roots[j]) == equal


def test_compact() -> None:
    labels = torch.tensor([[1, 2], [1, 2]])
    assert compact(labels).tolist() == [[1, 2]]
    assert compact(labels.t()).tolist() == [[1], [2]]
    assert compact(torch.ones(2, 3, dtype=torch.int64)).shape == (1, 1)
    assert compact(torch.ones(0, 3, dtype=torch.int64)).shape == (0, 1)
