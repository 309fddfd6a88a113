"""Rotation sites of small models, that rotating keeps their outputs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_models import (
    HEAD,
    WIDTH,
    Attention,
    Decoder,
    Gated,
    RMSNorm,
    ids,
    normals,
    orthogonal,
    randomized,
)
from torch import Tensor, nn

from ao_core.errors import ConfigError, GraphError
from ao_core.graph import (
    ModelGraph,
    RotationSite,
    analyze,
    keeping_mean,
    outputs,
    prove,
    relative_difference,
    rotated,
    rotated_online,
    sharing,
    tensors_of,
)


def x(*shape: int) -> Tensor:
    return normals(*(shape or (3, 4, WIDTH))).float()


def rotation_of(site: RotationSite) -> Tensor:
    return keeping_mean(orthogonal(site.size - 1)) if site.keeps_mean else orthogonal(site.size)


def proven(model: nn.Module, inputs: Any) -> ModelGraph:
    """The graph of a model; each site keeps its outputs and changes its parameters."""
    randomized(model)
    graph = analyze(model, inputs)
    for site in graph.rotation_sites:
        changed = rotated(tensors_of(model), site, rotation_of(site))
        for name, value in changed.items():
            assert relative_difference([tensors_of(model)[name]], [value]) > 0.05
        buffers = dict(model.named_buffers())
        others = {n: v if n in buffers else nn.Parameter(v) for n, v in changed.items()}
        after = outputs(sharing(model, others), inputs)
        assert relative_difference(outputs(model, inputs), after) <= 1e-5, site
    return graph


def kinds(graph: ModelGraph) -> list[tuple[str, str, int, int, bool]]:
    return [
        (site.kind, site.name, site.size, len(site.folds), site.keeps_mean)
        for site in graph.rotation_sites
    ]


@pytest.mark.parametrize("norm", [RMSNorm, lambda n: RMSNorm(n, 1.0), nn.RMSNorm])
def test_a_decoder_has_its_residual_stream_and_its_heads(norm: Any) -> None:
    graph = proven(Decoder(norm), ids())
    assert kinds(graph) == [
        ("residual", "embed.weight", WIDTH, 3, False),
        ("heads", "attention.kv.weight", HEAD, 0, False),
    ]
    assert [(site.parameter, site.dim, site.module) for site in graph.online_sites] == [
        ("mlp.down.weight", 1, "mlp.down")
    ]
    residual = graph.rotation_sites[0]
    assert {d.parameter for d in residual.writers} == {
        *(
            "embed.weight",
            "attention.o.weight",
            "attention.o.bias",
            "mlp.down.weight",
            "mlp.down.bias",
        )
    }
    assert {d.parameter for d in residual.readers} == {
        *(
            "attention.q.weight",
            "attention.kv.weight",
            "mlp.gate.weight",
            "mlp.up.weight",
            "head.weight",
        )
    }
    heads = graph.rotation_sites[1].readers[0]
    assert heads.indices.tolist() == torch.arange(24).reshape(4, HEAD).tolist()


def test_layer_norm_takes_rotations_that_keep_the_mean() -> None:
    graph = proven(Decoder(nn.LayerNorm), ids())
    assert kinds(graph)[0] == ("residual", "embed.weight", WIDTH, 3, True)
    model = randomized(Decoder(nn.LayerNorm))
    with pytest.raises(ConfigError, match=r"R·1 has to be 1.*keeping_mean\(Q\) from Q of size 11"):
        rotated(tensors_of(model), graph.rotation_sites[0], orthogonal(WIDTH))


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_keeping_mean(size: int) -> None:
    matrix = keeping_mean(
        orthogonal(size - 1) if size > 1 else torch.zeros(0, 0, dtype=torch.float64)
    )
    assert matrix.shape == (size, size)
    assert (matrix @ matrix.T - torch.eye(size)).abs().max() < 1e-12
    assert (matrix.sum(1) - 1).abs().max() < 1e-12
    if size > 2:
        assert (matrix - torch.eye(size)).abs().max() > 0.1


@pytest.mark.parametrize("eager", [False, True])
def test_heads_of_attention_alone(eager: bool) -> None:
    graph = proven(Attention(rotary=True, eager=eager), x())
    assert kinds(graph) == [("heads", "kv.weight", HEAD, 0, False)]


def test_two_linear_layers_have_hidden_channels() -> None:
    graph = proven(nn.Sequential(nn.Linear(WIDTH, 10), nn.Linear(10, 3)), x())
    assert kinds(graph) == [("hidden", "0.weight", 10, 0, False)]


def test_a_tied_head_refuses_the_stream_with_both_names() -> None:
    graph = proven(Decoder(tied=True), ids())
    assert [kind for kind, *_ in kinds(graph)] == ["heads"]
    (note,) = (n for n in graph.notes if "not rotated" in n)
    assert "last.weight is a factor for each channel and cannot move into what reads them" in note
    assert "embed.weight and head.weight are one tensor" in note


def test_a_tied_head_without_a_weight_in_the_norm_is_rotated_with_the_embedding() -> None:
    model = Decoder(lambda n: nn.RMSNorm(n, elementwise_affine=False), tied=True)
    graph = proven(model, ids())
    residual = graph.rotation_sites[0]
    assert residual.kind == "residual"
    assert [d.parameter for d in (*residual.writers, *residual.readers)].count("embed.weight") == 1


class Between(nn.Module):
    """A stream of which something is computed that rotations do not pass."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.a, self.b, self.what = nn.Linear(WIDTH, 8), nn.Linear(8, 3), what

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.what(self.a(x)))


BLOCKS = {
    "relu": torch.relu,
    "each channel": lambda t: t * torch.arange(8.0),
    "a number": lambda t: t + 1,
    "a tensor of one number": lambda t: t + torch.ones(()),
    "one number per row": lambda t: t + t.new_ones(4, 1),
    "mean": lambda t: t - t.mean(-1, keepdim=True),
    "sum": lambda t: t * t.sum(-1, keepdim=True),
    "squares": lambda t: t.pow(2),
    "own product": lambda t: t * t,
    "squares over tokens": lambda t: t * t.pow(2).mean(1, keepdim=True),
    "cubes": lambda t: t * t.pow(3).mean(-1, keepdim=True),
    "division": lambda t: 1 / t,
    "dtype": lambda t: t.int().float(),
    "flip": lambda t: t.flip(-1),
    "select": lambda t: t * t[..., 0][..., None],
    "pad": lambda t: torch.nn.functional.pad(t, (1, -1)),
    "softmax": lambda t: t.softmax(-1),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_blocks_a_rotation(name: str) -> None:
    graph = proven(Between(BLOCKS[name]), x())
    assert graph.rotation_sites == ()
    assert len(graph.online_sites) + len(graph.notes) >= 1


@pytest.mark.parametrize(
    "what",
    [
        lambda t: t * 3 / 2,
        lambda t: -t.transpose(0, 1).transpose(0, 1).reshape(12, 8).reshape(3, 4, 8),
        lambda t: t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda t: t / t.norm(dim=-1, keepdim=True),
        lambda t: t + 2 * t,
        lambda t: torch.cat((t, t), 0)[:3],
    ],
)
def test_what_passes_a_rotation(what: Any) -> None:
    graph = proven(Between(what), x())
    assert [site.size for site in graph.rotation_sites] == [8]


def test_segments_rotate_by_themselves() -> None:
    graph = proven(Between(lambda t: torch.cat((t[..., :3], t[..., 3:]), -1)), x())
    assert sorted(site.size for site in graph.rotation_sites) == [3, 5]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_is_rotated_if_it_is_saved(persistent: bool) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, 3)
            self.register_buffer("positions", x(4, 8), persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) + self.positions)

    graph = proven(Positions(), x())
    assert len(graph.rotation_sites) == persistent
    if not persistent:
        assert [site.parameter for site in graph.online_sites] == ["a.weight", "b.weight"]


def test_folding_a_norm_whose_weight_has_zeros() -> None:
    model = randomized(Decoder(nn.LayerNorm))
    site = analyze(model, ids()).rotation_sites[0]
    with torch.no_grad():
        model.one.weight[2] = 0
    with pytest.raises(GraphError, match=r"one\.weight has a zero where one\.bias has none"):
        rotated(tensors_of(model), site, rotation_of(site))
    with torch.no_grad():
        model.one.bias[2] = 0
    error = prove(model, ids(), lambda t: rotated(t, site, rotation_of(site)), what="it")
    assert error <= 1e-5
    assert torch.equal(model.one.weight, torch.ones(WIDTH))


def test_matrices_are_checked() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 10), nn.Linear(10, 3))
    (site,) = analyze(model, x()).rotation_sites
    with pytest.raises(ConfigError, match=r"so R is \(10, 10\), not \(9, 9\)"):
        rotated(tensors_of(model), site, orthogonal(9))
    with pytest.raises(ConfigError, match="differs from the identity"):
        rotated(tensors_of(model), site, torch.ones(10, 10))
    with pytest.raises(ConfigError, match="differs from the identity"):
        rotated(tensors_of(model), site, torch.full((10, 10), torch.nan))


def test_an_online_site_needs_its_input_rotated() -> None:
    model = randomized(Gated())
    sites = {site.module: site for site in analyze(model, x()).online_sites}
    assert set(sites) == {"gate", "up", "down"}
    site = sites["down"]
    matrix = orthogonal(site.size)
    with pytest.raises(GraphError, match=r"^down: the outputs for the example inputs would differ"):
        prove(model, x(), lambda t: rotated_online(t, site, matrix), what="down")
    before = outputs(model, x())
    online = {site.module: matrix}
    prove(model, x(), lambda t: rotated_online(t, site, matrix), what="down", online=online)
    model.down.register_forward_pre_hook(lambda _, args: (args[0] @ matrix.float(),))
    assert relative_difference(before, outputs(model, x())) <= 1e-5
