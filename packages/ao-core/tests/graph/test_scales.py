"""Scale groups of small models, and that scaling keeps their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_models import (
    HEAD,
    HEADS,
    SHARED,
    WIDTH,
    Attention,
    Decoder,
    Gated,
    RMSNorm,
    ids,
    normals,
    randomized,
)
from torch import Tensor, nn
from torch.nn import functional as F

from ao_core.errors import ConfigError
from ao_core.graph import (
    ModelGraph,
    analyze,
    outputs,
    prove,
    relative_difference,
    scaled,
    sharing,
    tensors_of,
)


class Function(nn.Module):
    """Layers a and b, and what is between them."""

    def __init__(self, between: Callable[..., Any], a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.between = a, b, between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


def two(between: Callable[..., Any], hidden: int = 10, read: int | None = None) -> nn.Module:
    return Function(between, nn.Linear(WIDTH, hidden), nn.Linear(read or hidden, 5))


def x(*shape: int) -> Tensor:
    return normals(*(shape or (3, 4, WIDTH))).float()


def proven(model: nn.Module, inputs: Any, tolerance: float = 1e-5) -> ModelGraph:
    """The graph of a model; each group keeps the outputs, with large scales, and changes its parameters."""
    randomized(model)
    graph = analyze(model, inputs)
    before = outputs(model, inputs)
    for group in graph.scale_groups:
        sign = torch.ones(()) if group.positive else normals(group.size).sign()
        changed = scaled(tensors_of(model), group, sign * normals(2, group.size)[1].exp())
        assert set(changed) == {site.parameter for site in group.dimensions}
        for name, value in changed.items():
            assert relative_difference([tensors_of(model)[name]], [value]) > 0.1
        other = sharing(model, {name: nn.Parameter(value) for name, value in changed.items()})
        assert relative_difference(before, outputs(other, inputs)) <= tolerance, group
    return graph


def found(
    graph: ModelGraph,
) -> set[tuple[frozenset[tuple[str, int]], frozenset[tuple[str, int]], int]]:
    """Producers, consumers and size of each group."""
    return {
        (
            frozenset((s.parameter, s.dim) for s in group.producers),
            frozenset((s.parameter, s.dim) for s in group.consumers),
            group.size,
        )
        for group in graph.scale_groups
    }


def group(producers: str, consumers: str, size: int) -> Any:
    """As `found` gives it, from "a.weight:0 a.bias:0"."""

    def sites(text: str) -> frozenset[tuple[str, int]]:
        return frozenset((name, int(dim)) for name, dim in (s.split(":") for s in text.split()))

    return sites(producers), sites(consumers), size


AB = group("a.weight:0 a.bias:0", "b.weight:1", 10)


@pytest.mark.parametrize(
    ("between", "positive"),
    [
        (torch.relu, True),
        (lambda t: F.leaky_relu(t, 0.1), True),
        (torch.abs, True),
        (nn.Identity(), False),
        (lambda t: -t * 3 / 2, False),
        (lambda t: t.reshape(-1, 2, 5).transpose(0, 1).transpose(0, 1).reshape(3, 4, 10), False),
        (lambda t: torch.cat((t[..., :4], t[..., 4:]), -1), False),
        (lambda t: t.masked_fill(torch.arange(10) > 6, 0.0), False),
    ],
)
def test_what_is_homogeneous_passes_scales(between: Callable[..., Any], positive: bool) -> None:
    graph = proven(two(between), x())
    assert found(graph) == {AB}
    assert [g.positive for g in graph.scale_groups] == [positive]


def test_relu_wants_positive_scales() -> None:
    graph = proven(two(torch.relu), x())
    assert found(graph) == {AB}
    assert graph.scale_groups[0].positive
    with pytest.raises(ConfigError, match=r"a\.weight have to be finite and positive"):
        scaled({}, graph.scale_groups[0], -torch.ones(10))


@pytest.mark.parametrize(
    "between",
    [
        F.gelu,
        torch.sigmoid,
        lambda t: t + 1,
        lambda t: t * t,
        lambda t: t.softmax(-1),
        lambda t: t.int().float(),
        lambda t: t.cumsum(-1),
        lambda t: t.masked_fill(torch.arange(10) > 6, 1.0),
        lambda t: torch.nn.functional.pad(t, (1, -1), value=1.0),
    ],
)
def test_other_functions_block(between: Callable[..., Any]) -> None:
    assert proven(two(between), x()).scale_groups == ()


def test_a_sum_of_neighbours_makes_their_scales_equal() -> None:
    graph = proven(two(lambda t: t[..., :5] + t[..., 5:], read=5), x())
    assert found(graph) == {group("a.weight:0 a.bias:0", "b.weight:1", 5)}
    (site, _) = graph.scale_groups[0].producers
    assert site.channels.tolist() == [0, 1, 2, 3, 4] * 2


def test_a_product_of_channels_has_the_product_of_scales() -> None:
    graph = proven(two(lambda t: t[..., :5] * t[..., 5:], read=5), x())
    assert len(graph.scale_groups) >= 1


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_attention_with_shared_heads(rotary: bool, eager: bool) -> None:
    """v → o through heads that are shared, q ↔ k through pairs of rotary positions."""
    graph = proven(Attention(rotary=rotary, eager=eager), x())
    qk = SHARED * HEAD // (2 if rotary else 1)
    assert found(graph) == {
        group("q.weight:0 q.bias:0", "kv.weight:0 kv.bias:0", qk),
        group("kv.weight:0 kv.bias:0", "o.weight:1", SHARED * HEAD),
    }
    value = next(g for g in graph.scale_groups if g.consumers[0].parameter == "o.weight")
    heads = value.consumers[0].channels.reshape(HEADS, HEAD)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])


def test_a_gated_mlp_scales_up_not_the_gate() -> None:
    graph = proven(Gated(), x())
    assert found(graph) == {group("up.weight:0 up.bias:0", "down.weight:1", 20)}


@pytest.mark.parametrize("norm", [RMSNorm, nn.LayerNorm, lambda n: RMSNorm(n, 1.0), nn.RMSNorm])
def test_norms_move_into_all_that_read_them(norm: Any) -> None:
    model = Decoder(norm)
    graph = proven(model, ids())
    bias = " {}.bias:0" if isinstance(model.one, nn.LayerNorm) else ""
    wanted = {
        group(
            f"one.weight:0{bias.format('one')}", "attention.q.weight:1 attention.kv.weight:1", WIDTH
        ),
        group(f"two.weight:0{bias.format('two')}", "mlp.gate.weight:1 mlp.up.weight:1", WIDTH),
        group(f"last.weight:0{bias.format('last')}", "head.weight:1", WIDTH),
    }
    assert wanted < found(graph)
    assert len(graph.scale_groups) == 6
    offsets = {
        s.offset for g in graph.scale_groups for s in g.producers if s.parameter == "one.weight"
    }
    assert offsets == {getattr(model.one, "offset", 0.0)}


def test_a_tied_head_keeps_the_last_norm() -> None:
    graph = proven(Decoder(tied=True), ids())
    assert len(graph.scale_groups) == 5
    assert not any("last" in g.name for g in graph.scale_groups)


def test_a_parameter_used_with_two_offsets_is_left() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = RMSNorm(WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
            return self.a(plain * self.norm.weight) + self.b(plain * (self.norm.weight + 1))

    assert proven(Twice(), x()).scale_groups == ()


@pytest.mark.parametrize(("groups", "sizes"), [(1, [6, 12]), (2, [3, 12]), (6, [12])])
def test_convolutions(groups: int, sizes: list[int]) -> None:
    """Groups of channels share their columns; a depthwise one with a bias has the scale of its rows."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 12, 3, groups=groups),
        nn.Conv2d(12, 2, 1),
    )
    graph = proven(model, x(2, 3, 12, 12))
    assert sorted(group.size for group in graph.scale_groups) == sizes
    assert [group.positive for group in graph.scale_groups] == [True, False][2 - len(sizes) :]


def test_the_weight_of_a_batch_norm_is_scaled_with_what_reads_it() -> None:
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 2, 1))
    graph = proven(model, x(2, 3, 9))
    assert found(graph) == {group("1.weight:0 1.bias:0", "3.weight:1", 8)}


def test_a_factor_for_each_token_has_one_scale_for_all_tokens() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 10), nn.Linear(10, 5)
            self.factors = nn.Parameter(torch.ones(40))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)) * self.factors.view(4, 10))

    graph = proven(Positions(), x())
    assert found(graph) == {group("factors:0", "b.weight:1", 10)}


def test_experts_share_one_scale() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(normals(4, WIDTH, 10).float())
            self.down = nn.Parameter(normals(4, 10, WIDTH).float())

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(torch.relu(torch.bmm(x, self.up)), self.down)

    graph = proven(Experts(), x(4, 3, WIDTH))
    assert found(graph) == {group("up:2", "down:1", 10)}


def test_a_write_through_a_view_is_seen() -> None:
    """What is written into zeros is read under the name of the zeros."""

    def between(t: Tensor) -> Tensor:
        kept = torch.zeros(3, 4, 10)
        kept[..., :] = torch.tanh(t)
        return kept

    def added(t: Tensor) -> Tensor:
        t += 1
        return t

    def squashed(t: Tensor) -> Tensor:
        t.sigmoid_()
        return t

    for function in (between, added, squashed):
        assert proven(two(function), x()).scale_groups == ()


def test_a_product_through_a_view_is_seen_under_the_first_name() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 10)
            self.b, self.d = nn.Linear(10, 5), nn.Linear(10, 5)

        def forward(self, x: Tensor) -> Tensor:
            t, u = self.a(x), self.c(x)
            t.view(-1, 10).mul_(u.view(-1, 10))
            return self.b(t) + self.d(u)

    graph = proven(InPlace(), x())
    assert found(graph) == {group("a.weight:0 a.bias:0", "b.weight:1", 10)}


def test_an_operation_without_a_rule_is_named() -> None:
    graph = proven(two(lambda t: torch.flip(t, (-1,))), x())
    assert graph.scale_groups == ()
    (note,) = (n for n in graph.notes if "'flip'" in n)
    assert (
        note
        == "scales are not followed through the operation 'flip', which has no rule (in the model)"
    )


def test_unused_parameters_are_no_group() -> None:
    model = two(torch.relu)
    model.unused = nn.Linear(10, 10)
    assert found(proven(model, x())) == {AB}


def test_parameters_keep_their_dtype_and_the_group_checks_its_scales() -> None:
    model = two(torch.relu).bfloat16()
    (only,) = analyze(model, x().bfloat16()).scale_groups
    changed = scaled(tensors_of(model), only, torch.full((10,), 2.0))
    assert {value.dtype for value in changed.values()} == {torch.bfloat16}
    assert torch.equal(changed["a.weight"] * 2, model.a.weight)
    assert torch.equal(changed["b.weight"], model.b.weight * 2)
    for wrong, text in (
        (torch.ones(9), r"shape is \(9,\)"),
        (torch.full((10,), torch.inf), "finite"),
    ):
        with pytest.raises(ConfigError, match=text):
            scaled(tensors_of(model), only, wrong)
    assert (
        prove(model, x().bfloat16(), lambda t: scaled(t, only, torch.full((10,), 3.0)), what="it")
        < 1e-6
    )
