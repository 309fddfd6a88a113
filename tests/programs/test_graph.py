"""Scale groups and rotation sites of models that people run: every one keeps the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from zoo import MODELS, Sample

from ao_core.ext import GraphError
from ao_core.ext.graph import (
    ModelGraph,
    RotationSite,
    ScaleGroup,
    analyze,
    keeping_mean,
    outputs,
    prove,
    relative_difference,
    rotated,
    rotated_online,
    scaled,
    sharing,
    tensors_of,
)

TOLERANCE = 1e-5


def _gpt2(*, tied: bool) -> Any:
    config = MODELS["gpt2"].config()
    config.tie_word_embeddings = tied
    return config


def _opt(*, tied: bool) -> Any:
    return tf.OPTConfig(
        vocab_size=128,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )


def _vit() -> Any:
    config = MODELS["vit"].config()
    config.num_labels = 10
    return config


_tokens = MODELS["llama"].inputs
SAMPLES = {
    **{name: MODELS[name] for name in ("llama", "qwen3", "gemma3", "mixtral", "qwen3_moe")},
    "gpt2": Sample(tf.GPT2LMHeadModel, lambda: _gpt2(tied=False), _tokens),
    "gpt2-tied": Sample(tf.GPT2LMHeadModel, lambda: _gpt2(tied=True), _tokens),
    "opt": Sample(tf.OPTForCausalLM, lambda: _opt(tied=False), _tokens),
    "opt-tied": Sample(tf.OPTForCausalLM, lambda: _opt(tied=True), _tokens),
    "bert": MODELS["bert"],
    "vit": Sample(tf.ViTForImageClassification, _vit, MODELS["vit"].inputs),
    "whisper": MODELS["whisper"],
}


@dataclass(frozen=True)
class Least:
    """What has to be found in a model of two layers."""

    #: norm → readers, v → o, up → down, q ↔ k; only positive ones through a ReLU
    groups: int
    positive: int
    residual: int
    heads: int
    online: int


LEAST = {
    # per layer two norms, v, up, q/k; the last norm
    "llama": Least(11, 0, 1, 2, 2),
    "qwen3": Least(11, 0, 1, 2, 2),
    # its norms behind a layer's parts are read by the stream, and the last one by the tied head
    "gemma3": Least(10, 0, 0, 2, 2),
    # the input of fused experts is not the input of a module
    "mixtral": Least(11, 0, 1, 2, 0),
    "qwen3_moe": Least(11, 0, 1, 2, 0),
    # GELU: nothing between fc1 and fc2
    "gpt2": Least(9, 0, 1, 2, 2),
    "gpt2-tied": Least(8, 0, 0, 2, 2),
    # ReLU
    "opt": Least(11, 2, 1, 2, 2),
    "opt-tied": Least(10, 2, 0, 2, 2),
    # norms are in the stream
    "bert": Least(4, 0, 0, 2, 2),
    "vit": Least(9, 0, 1, 2, 2),
    # two layers of four groups, two of seven, the norm of the encoder
    "whisper": Least(23, 0, 0, 6, 4),
}


def first(output: Any) -> Any:
    """The logits, or the last hidden state."""
    return output[0]


@cache
def analyzed(name: str) -> tuple[nn.Module, dict[str, Any], ModelGraph]:
    """A model whose norms and biases are random, its inputs and its graph."""
    sample = SAMPLES[name]
    model, generator = sample.build(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model, sample.inputs(), analyze(model, sample.inputs(), first)


def normals(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def scales_of(group: ScaleGroup) -> Tensor:
    """exp(N(0, 1)), of both signs where a group allows it."""
    signs = torch.ones(()) if group.positive else normals(group.size).sign()
    return normals(2, group.size)[1].exp() * signs


def orthogonal(size: int) -> Tensor:
    return torch.linalg.qr(normals(size, size))[0]


def rotation_of(site: RotationSite) -> Tensor:
    return keeping_mean(orthogonal(site.size - 1)) if site.keeps_mean else orthogonal(site.size)


def difference(name: str, changed: dict[str, Tensor]) -> float:
    """How far the logits move, and that the parameters do."""
    model, inputs, _ = analyzed(name)
    tensors = tensors_of(model)
    for key, value in changed.items():
        assert relative_difference([tensors[key]], [value]) > 0.1, key
    other = sharing(model, {key: nn.Parameter(value) for key, value in changed.items()})
    return relative_difference(outputs(model, inputs, first), outputs(other, inputs, first))


@pytest.mark.parametrize("name", SAMPLES)
def test_as_many_groups_and_sites_as_the_architecture_has(name: str) -> None:
    graph, least = analyzed(name)[2], LEAST[name]
    kinds = [site.kind for site in graph.rotation_sites]
    assert len(graph.scale_groups) == least.groups
    assert sum(group.positive for group in graph.scale_groups) == least.positive
    assert kinds.count("residual") == least.residual
    assert kinds.count("heads") == least.heads
    assert len(graph.online_sites) == least.online
    if not least.residual:
        assert any("channels that" in note and "not rotated" in note for note in graph.notes)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_scale_group_keeps_the_logits(name: str) -> None:
    model, _, graph = analyzed(name)
    for group in graph.scale_groups:
        assert difference(name, scaled(tensors_of(model), group, scales_of(group))) <= TOLERANCE


@pytest.mark.parametrize("name", SAMPLES)
def test_every_rotation_keeps_the_logits(name: str) -> None:
    model, _, graph = analyzed(name)
    for site in graph.rotation_sites:
        changed = rotated(tensors_of(model), site, rotation_of(site))
        assert difference(name, changed) <= TOLERANCE, site


@pytest.mark.parametrize("name", [name for name, least in LEAST.items() if least.online])
def test_every_online_rotation_keeps_the_logits(name: str) -> None:
    model, inputs, graph = analyzed(name)
    site = graph.online_sites[0]
    matrix, tensors = orthogonal(site.size), tensors_of(model)
    before = {key: tensor.detach().clone() for key, tensor in tensors.items()}

    def turned(tensors: Any) -> dict[str, Tensor]:
        return rotated_online(tensors, site, matrix)

    with pytest.raises(GraphError, match=r": the outputs for the example inputs would differ by"):
        prove(model, inputs, turned, what=site.parameter, select=first)
    assert all(torch.equal(tensors[key], value) for key, value in before.items())
    copy = sharing(model, {site.parameter: nn.Parameter(before[site.parameter])})
    online = {site.module: matrix}
    assert prove(copy, inputs, turned, what="it", select=first, online=online) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "vit", "qwen3_moe"])
def test_everything_at_once_keeps_the_logits(name: str) -> None:
    """All groups, then all sites: what is scaled is folded and rotated afterwards."""
    model, _, graph = analyzed(name)

    def everything(tensors: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        steps: list[Callable[[Any], dict[str, Tensor]]] = [
            *(
                lambda t, g=group: scaled(t, g, scales_of(g).clamp(-3, 3))
                for group in graph.scale_groups
            ),
            *(lambda t, s=site: rotated(t, s, rotation_of(s)) for site in graph.rotation_sites),
        ]
        for step in steps:
            found |= step({**tensors, **found})
        return found

    assert difference(name, everything(tensors_of(model))) <= TOLERANCE


def test_a_wrong_group_is_refused_and_nothing_is_changed() -> None:
    """The rows of a gate in front of SiLU are no channels that could be scaled."""
    model, inputs, graph = analyzed("llama")
    up = next(g for g in graph.scale_groups if g.name == "model.layers.0.mlp.up_proj.weight")
    gate = type(up.producers[0])(
        "model.layers.0.mlp.gate_proj.weight", 0, -1, up.producers[0].channels
    )
    wrong = type(up)(gate.parameter, up.size, (gate,), up.consumers, False)
    before = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    with pytest.raises(GraphError, match=r"gate_proj\.weight: the outputs .* differ by"):
        prove(model, inputs, lambda t: scaled(t, wrong, scales_of(wrong)), what=wrong.name)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(model).items())


def test_heads_that_share_values_share_a_scale() -> None:
    """Two heads of values, four of queries: each channel is in two columns of the output projection."""
    graph = analyzed("llama")[2]
    group = next(g for g in graph.scale_groups if "v_proj" in g.name)
    (consumer,) = group.consumers
    assert group.size == 32
    assert consumer.channels.tolist() == [*range(16), *range(16), *range(16, 32), *range(16, 32)]


def test_the_weight_of_a_norm_that_adds_one_is_scaled_with_it() -> None:
    graph = analyzed("gemma3")[2]
    group = next(g for g in graph.scale_groups if "input_layernorm" in g.name)
    assert [site.offset for site in group.producers] == [1.0]


def test_a_tied_head_is_named() -> None:
    (note,) = (n for n in analyzed("opt-tied")[2].notes if "one tensor" in n)
    assert "embed_tokens.weight and lm_head.weight" in note


def test_a_loop_over_experts_is_refused_with_what_works() -> None:
    model = SAMPLES["mixtral"].build()
    model.config.use_cache = False
    model.set_experts_implementation("eager")
    with pytest.raises(GraphError, match=r"sizes depend on values.*set_experts_implementation"):
        analyze(model, SAMPLES["mixtral"].inputs(), first)


def test_what_is_selected_need_not_be_all_that_is_returned() -> None:
    """A cache of keys and values is not an output that has to stay when the logits are selected."""
    model, inputs = SAMPLES["llama"].build(), SAMPLES["llama"].inputs()
    assert model.config.use_cache
    assert len(analyze(model, inputs, first).scale_groups) == LEAST["llama"].groups
    with pytest.raises(GraphError, match=r"cannot trace LlamaForCausalLM .*use_cache=False"):
        analyze(model, inputs)
