"""Masks, indices and norms; what cannot go; bad input."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ao_core.ext import ConfigError, UnknownNameError
from ao_sparsity import (
    RemovalError,
    Rows,
    apply_masks,
    channel_groups,
    ln_structured,
    prune_magnitude,
    remove_channels,
    remove_masks,
)


def mlp(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9, bias), nn.ReLU(), nn.Linear(9, 5, bias))


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).sigmoid() * self.up(x))


class Normed(nn.Module):
    """An embedding, a residual stream with norms, a head."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), norm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.down(self.up(self.norm(x)).relu()))


def rows(shape: tuple[int, ...], gone: list[int], dim: int = 0) -> Tensor:
    return torch.ones(shape, dtype=torch.bool).index_fill_(dim, torch.tensor(gone), False)


def gone_of(model: nn.Module, channels: Any, x: Any = X, **options: Any) -> list[tuple[int, ...]]:
    return [g.channels for g in remove_channels(model, x, channels, **options)[1].removed]


def test_rows_of_writers_columns_of_readers_and_indices_name_channels() -> None:
    assert gone_of(mlp(), {"0.weight": rows((9, 6), [2, 4])}) == [(2, 4)]
    assert gone_of(mlp(), {"2.weight": rows((5, 9), [3], dim=1)}) == [(3,)]
    assert gone_of(mlp(), {"0.weight": [8, 0, 8]}) == [(0, 8)]
    assert gone_of(mlp(), {("2.weight", 1): torch.tensor([5])}) == [(5,)]
    assert gone_of(mlp(), {"0.bias": range(2)}) == [(0, 1)]


def test_what_indices_and_masks_name_adds_up() -> None:
    channels = {"0.weight": rows((9, 6), [2]), "2.weight": rows((5, 9), [3], 1), "0.bias": [4]}
    assert gone_of(mlp(), channels) == [(2, 3, 4)]


def test_a_mask_keeps_what_it_keeps() -> None:
    model = Gated()
    both = {"gate.weight": rows((8, 6), [1, 2]), "up.weight": rows((8, 6), [2, 3])}
    _, report = remove_channels(model, X, both)
    assert [g.channels for g in report.removed] == [(2,)]
    assert [(k.fqn, k.count) for k in report.kept] == [("gate.weight", 1), ("up.weight", 1)]
    assert "masks of other parameters" in report.kept[0].reason
    # indices are a wish for the whole group
    assert gone_of(model, {"gate.weight": [1], "up.weight": [3]}) == [(1, 3)]


class Fused(nn.Module):
    """Gate and up in one matrix: each channel is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(gate.sigmoid() * up)


def test_channels_that_are_twice_in_a_matrix() -> None:
    torch.manual_seed(0)
    model = Fused()
    (group,) = [g for g in channel_groups(model, X) if not g.reason]
    assert group.select([1]) == {("gate_up.weight", 0): [1, 9]}
    assert gone_of(model, {"gate_up.weight": [9]}) == [(1,)]
    both = {"gate_up.weight": rows((16, 6), [1, 2, 9, 11])}
    _, report = remove_channels(model, X, both)
    assert [g.channels for g in report.removed] == [(1,)]
    assert [kept.count for kept in report.kept] == [2]
    # its norm is that of both rows, their biases and the column
    fused = torch.cat([model.gate_up.weight, model.gate_up.bias[:, None]], 1)
    norms = torch.cat([fused[:8], fused[8:], model.down.weight.T], 1).norm(dim=1)
    assert ln_structured(model, X, 1 / 8) == group.select([int(norms.argmin())])


def test_a_mask_with_single_zeros_removes_nothing() -> None:
    mask = torch.ones(9, 6, dtype=torch.bool)
    mask[2, :5] = False
    model = mlp()
    smaller, report = remove_channels(model, X, {"0.weight": mask})
    assert not report.removed
    assert not report.kept
    assert torch.equal(smaller(X), model(X))


def test_masks_of_pruning() -> None:
    """Rows go from what writes and what reads them, and the masks that are on the model with them."""
    model = mlp()
    pruning = prune_magnitude(model, Rows(sparsity=1 / 3))
    apply_masks(model, pruning)
    gone = [i for i in range(9) if not pruning.masks["0.weight"][i].any()]
    smaller, report = remove_channels(model, X, pruning.masks)
    assert [g.channels for g in report.removed] == [tuple(gone)]
    assert len(gone) == 3
    assert [(kept.fqn, kept.count) for kept in report.kept] == [("2.weight", 2)]
    assert smaller[0].weight.shape == smaller[0].weight_sparsity_mask.shape == (6, 6)
    assert smaller[2].weight.shape == smaller[2].weight_sparsity_mask.shape == (5, 6)
    assert remove_masks(smaller) == ["0.weight", "2.weight"]
    model[2].weight.data[:, gone] = 0
    torch.testing.assert_close(smaller(X), model(X))


def test_nothing_is_nothing() -> None:
    smaller, report = remove_channels(mlp(), X, {})
    assert (
        report.parameters[0] == report.parameters[1] == sum(p.numel() for p in mlp().parameters())
    )
    assert report.difference == 0
    assert smaller[0].out_features == 9


@pytest.mark.parametrize("order", [1, 2, 3.0, math.inf])
def test_channels_of_least_norm(order: float) -> None:
    model = mlp()
    weights = torch.cat([model[0].weight, model[0].bias[:, None], model[2].weight.T], 1)
    norms = torch.linalg.vector_norm(weights.double(), ord=order, dim=1)
    least = sorted(norms.argsort()[:4].tolist())
    assert ln_structured(model, X, 4 / 9, order) == {("0.weight", 0): least}


def test_a_multiple_stays_and_a_filter_chooses() -> None:
    model = nn.Sequential(mlp(), nn.Linear(5, 70), nn.ReLU(), nn.Linear(70, 2))
    found = ln_structured(model, X, 0.5, multiple_of=16)
    assert {name: len(gone) for (name, _), gone in found.items()} == {"1.weight": 70 - 48}
    # both of the layers without an activation between them have channels too
    found = ln_structured(model, X, 0.5, filter_fn=lambda group: group.name.startswith("0."))
    assert {name: len(gone) for (name, _), gone in found.items()} == {
        "0.0.weight": 4,
        "0.2.weight": 2,
    }
    assert ln_structured(model, X, 0.0) == {}


def test_a_norm_over_channels_is_only_left_on_request() -> None:
    model, ids = Normed(), torch.randint(0, 11, (2, 5))
    stream = next(g for g in channel_groups(model, ids) if g.size == 8)
    assert stream.reason is None
    assert "layer_norm divides by a statistic" in str(stream.inexact)
    assert ("embedding.weight", 1) in stream.writers
    assert [n for n, _ in ln_structured(model, ids, 0.5)] == ["up.weight"]
    _, report = remove_channels(model, ids, stream.select([0]))
    assert not report.removed
    assert "exact=False" in report.kept[0].reason
    smaller, report = remove_channels(model, ids, stream.select([0, 5]), exact=False)
    assert smaller.norm.normalized_shape == (6,)
    assert smaller.embedding.weight.shape == (11, 6)
    assert smaller.embedding.embedding_dim == 6
    assert smaller.head(smaller.norm(torch.randn(2, 6))).shape == (2, 3)
    assert 1e-4 < report.difference < 2


def test_the_reasons_of_what_cannot_go() -> None:
    model, ids = Normed(nn.RMSNorm), torch.randint(0, 11, (2, 5))
    channels = {"head.weight": [0], "embedding.weight": [3, 4], "up.weight": [1]}
    _, report = remove_channels(model, ids, channels)
    assert [(kept.fqn, kept.count) for kept in report.kept] == [
        ("head.weight", 1),
        ("embedding.weight", 2),
    ]
    assert "output" in report.kept[0].reason
    assert "by number" in report.kept[1].reason
    assert [g.name for g in report.removed] == ["up.weight"]
    with pytest.raises(ConfigError, match=r"2 indices of embedding\.weight, dimension 0"):
        remove_channels(model, ids, channels, strict=True)
    _, report = remove_channels(mlp(), X, {("0.weight", 1): [0]})
    assert "example inputs" in report.kept[0].reason


class Sorted(nn.Module):
    """An operation of which nothing is known."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 7), nn.Linear(7, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).sort(-1).values).relu())


def test_an_unknown_operation_fixes_what_goes_through_it() -> None:
    reasons = {
        g.name: g.reason for g in channel_groups(Sorted(), X) if g.size in (7, 8) and g.writers
    }
    assert reasons == {"a.weight": "the operation sort is not known", "b.weight": None}


def test_a_report_says_all() -> None:
    model = Gated()
    _, report = remove_channels(model, X, {"gate.weight": [1, 2], "down.weight": [0]})
    text = str(report)
    assert "gate.weight" in text
    assert "1 indices of down.weight, dimension 0: a size of the model's output" in text
    before, after = report.parameters
    assert before == 3 * 48 + 8 + 8 + 6
    assert after == 3 * 36 + 6 + 6 + 6
    assert report.bytes == (4 * before, 4 * after)
    data = json.loads(report.to_json())
    assert data["removed"][0]["channels"] == [1, 2]
    assert data["removed"][0]["readers"] == [["down.weight", 1]]


class Mean(nn.Module):
    """Code that uses the number of channels: no smaller model is equal."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.relu() / h.shape[-1])


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(before) and all(torch.equal(now[k], before[k]) for k in now)


def test_a_model_that_is_not_equal_is_not_given() -> None:
    model = Mean()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RemovalError, match="not equal"):
        remove_channels(model, X, {"a.weight": [0, 1, 2]}, inplace=True)
    assert unchanged(model, before)
    assert model.a.out_features == 9


def test_a_model_that_cannot_be_exported() -> None:
    model = nn.Sequential(mlp(), Branching())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RemovalError, match=r"torch\.export cannot trace Sequential"):
        remove_channels(model, X, {"0.0.weight": [0]}, inplace=True)
    with pytest.raises(RemovalError, match=r"torch\.export cannot trace"):
        channel_groups(mlp(), torch.randn(3, 7))
    assert unchanged(model, before)


class DynamicCache:
    """What models of transformers return beside their logits."""


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, use_cache: bool = True) -> Any:
        y = self.linear(x)
        return (y, DynamicCache()) if use_cache else y


def test_a_model_that_returns_its_cache() -> None:
    x = torch.randn(3, 6)
    with pytest.raises(RemovalError, match=r"example_inputs: .*DynamicCache.*pass use_cache=False"):
        channel_groups(WithCache(), (x,))
    channel_groups(WithCache(), {"x": x, "use_cache": False})


def test_a_model_that_cannot_be_copied() -> None:
    model = mlp()
    model.iterator = (i for i in range(3))
    with pytest.raises(RemovalError, match="cannot be copied"):
        remove_channels(model, X, {"0.weight": [0]})


@pytest.mark.parametrize(
    ("channels", "error", "match"),
    [
        ({"0.wieght": [0]}, UnknownNameError, "Did you mean '0.weight'"),
        ({"0.weight": torch.ones(6, 9, dtype=torch.bool)}, ConfigError, r"need \(9, 6\)"),
        ({("0.weight", 0): torch.ones(9, 6, dtype=torch.bool)}, ConfigError, "name alone"),
        ({("0.weight", 2): [0]}, ConfigError, "no dimension 2"),
        ({"0.weight": [9]}, ConfigError, "0 to 8"),
        ({"0.weight": [-1]}, ConfigError, "0 to 8"),
        ({"0.weight": [[1]]}, ConfigError, "list of indices"),
        ({"0.weight": torch.tensor([0.5])}, ConfigError, "float32"),
        ({"0.weight": range(9)}, ConfigError, "all 9 channels of 0.weight would go"),
        ({"0.weight": torch.zeros(9, 6, dtype=torch.bool)}, ConfigError, "all 9 channels"),
    ],
)
def test_bad_channels(channels: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        remove_channels(mlp(), X, channels)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sparsity": 1.0}, "sparsity=1.0"),
        ({"sparsity": -0.1}, "sparsity=-0.1"),
        ({"sparsity": math.nan}, "sparsity=nan"),
        ({"order": 0}, "order=0"),
        ({"multiple_of": 0}, "multiple_of=0"),
    ],
)
def test_bad_shares(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ln_structured(mlp(), X, **options)


def test_weights_that_are_no_numbers() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    with pytest.raises(ConfigError, match=r"2\.weight has NaN"):
        ln_structured(model, X, 0.5)
    with pytest.raises(RemovalError, match="have NaN"):
        remove_channels(model, X, {"0.weight": [1]})
    # what goes may be anything
    model = mlp()
    with torch.no_grad():
        model[2].weight[:, 4] = math.nan
    smaller, _ = remove_channels(model, X, {"0.weight": [4]})
    assert smaller(X).isfinite().all()


def test_a_model_without_memory() -> None:
    with pytest.raises(ConfigError, match="meta"):
        remove_channels(mlp().to("meta"), X.to("meta"), {"0.weight": [0]})


def test_indices_beyond_a_group() -> None:
    group = channel_groups(mlp(), X)[0]
    with pytest.raises(ConfigError, match="channels 0 to 8"):
        group.select([9])
    assert group.select([]) == {("0.weight", 0): []}
