"""Plans of caches: measured layer by layer, and never worse than one recipe for all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_models import decoder, ids, logits, sequence
from transformers import DynamicCache

from ao_core.ext import ConfigError, QuantizationError, UnknownNameError
from ao_core.testing.warm import run_python
from ao_hf import AoCache, CachePlan, plan_cache
from ao_hf.cache import LayerChoice, LayerOption, UniformCache
from ao_hf.cache.choosing import chosen
from ao_quant.kv_cache import KV_RECIPES, KVCacheConfig

#: bits of the recipes for heads of 8 elements
BITS = {"kv8": 10.0, "k8v4": 9.0, "kv4": 6.125}


def lost(model: Any, data: Sequence[torch.Tensor], layers: Sequence[Any]) -> float:
    """KL in bits per position with these recipes, where no token is exact."""
    total, positions = 0.0, 0
    formats = [KV_RECIPES.get(name, name) if isinstance(name, str) else name for name in layers]
    unwindowed = [None if x is None else replace(x, window=0) for x in formats]
    for tokens in data:
        own = logits(model, tokens, DynamicCache(config=model.config)).double().log_softmax(-1)
        model.set_attn_implementation("ao_kv")
        found = logits(model, tokens, AoCache(model.config, unwindowed)).double().log_softmax(-1)
        model.set_attn_implementation("sdpa")
        total += float((own.exp() * (own - found)).sum()) / log(2)
        positions += tokens.numel()
    return total / positions


def test_a_plan_fits_and_is_never_worse_than_one_recipe() -> None:
    model, data = decoder("llama", num_hidden_layers=4), [ids(tokens=256), ids(1, 200)]
    plan, alike = None, {name: lost(model, data, [name] * 4) for name in BITS}
    for bits in (6.125, 7.0, 9.5, 12.0):
        plan = plan_cache(model, data, bits=bits, known=plan)
        assert plan.bits <= bits
        assert plan.measured == pytest.approx(lost(model, data, plan.layers), rel=1e-3)
        for each in plan.uniform:
            assert each.measured == pytest.approx(alike[str(each.recipe)], rel=1e-3)
            assert each.bytes_per_token * 8 / (4 * 32) == BITS[str(each.recipe)]
            if BITS[str(each.recipe)] <= bits:
                assert plan.measured <= each.measured
        assert len(str(plan).splitlines()) <= 30
    with pytest.raises(ConfigError, match="known=<CachePlan of 4 layers.* and kv8; leave it out"):
        plan_cache(model, data, bits=12.0, candidates=["kv8"], known=plan)


def test_a_layer_with_outlier_keys_gets_the_better_recipe() -> None:
    model, data = decoder("llama", num_hidden_layers=3), [ids(1, 256)]
    with torch.no_grad():
        for layer in (0, 2):
            model.model.layers[layer].self_attn.o_proj.weight *= 0.01
        model.model.layers[1].self_attn.k_proj.weight[::8] *= 3
    plan = plan_cache(model, data, bits=7.5, candidates=("kv8", "kv4"))
    assert plan.layers == ("kv4", "kv8", "kv4")
    kv4 = [choice.options[2].loss for choice in plan.choices]
    assert kv4[1] > max(kv4[0], kv4[2])
    assert plan.measured < lost(model, data, ["kv8", "kv4", "kv4"])


def test_wider_keys_are_part_of_an_option() -> None:
    """What `AoCache` does about keys that do not survive is measured, takes its bytes, and is said."""
    model, data = decoder("qwen2", num_hidden_layers=2, head_dim=16), [ids(1, 256)]
    with torch.no_grad():
        for layer, size in zip(model.model.layers, (0.0, 300.0), strict=True):
            layer.self_attn.k_proj.bias.zero_()[::7] = size
    plan = plan_cache(model, data, bits=8.0, candidates=("kv4",))
    first, second = (choice.options[1] for choice in plan.choices)
    assert second.note.startswith("keys are int8 per channel")
    assert first.note == ""
    assert second.bytes_per_token > first.bytes_per_token
    if plan.layers[1] == "kv4":
        assert "kv4; keys are int8 per channel" in str(plan)


def test_passes_that_begin_at_a_layer_are_those_of_the_whole_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks before the layer are skipped where that changes no bit, and else called as ever."""
    model, data = decoder("llama", num_hidden_layers=4), [ids(1, 256)]
    calls: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: calls.append(index))
    plan = plan_cache(model, data, bits=7.0)
    skipping = len(calls)
    assert all("forward" not in vars(layer) for layer in model.model.layers)
    calls.clear()
    monkeypatch.setattr("ao_hf.cache.judging.blocks_of", lambda *_: ())
    assert plan_cache(model, data, bits=7.0) == plan
    assert skipping < len(calls)
    monkeypatch.undo()
    # a block that reads more than it is given by the one before
    seen: list[torch.Tensor] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(args[2]))
    model.model.layers[3].mlp.register_forward_hook(lambda *args: args[2] + seen.pop())
    found = plan_cache(model, data, bits=7.0)
    assert found.measured == pytest.approx(lost(model, data, found.layers), rel=1e-3)


def test_bytes_and_divergence_as_budgets() -> None:
    model, data = decoder("llama"), [ids(1, 256)]
    plan = plan_cache(model, data, bytes_per_token=75.0)
    assert plan.bytes_per_token <= 75
    losses = sorted(each.measured for each in plan.uniform)
    for limit in (losses[0] / 2, losses[1], 2 * losses[-1]):
        plan = plan_cache(model, data, max_kl=limit)
        assert plan.measured <= limit
        fits = [each.bytes_per_token for each in plan.uniform if each.measured <= limit]
        assert plan.bytes_per_token <= min([*fits, 2 * 32 * 4])
    assert plan.taken is not None
    assert plan.taken.recipe == "kv4"


def test_nothing_is_changed() -> None:
    model, data = decoder("llama").train(), [{"input_ids": ids(), "attention_mask": ids() > 0}]
    before, state = copy.deepcopy(model.config.to_dict()), torch.get_rng_state()
    done: list[tuple[int, int, str]] = []
    plan_cache(model, data, bits=9.0, progress=lambda *args: done.append(args))
    assert model.training
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), state)
    assert done[0] == (0, 6, "layer 0 in kv8")
    assert done[-1] == (6, 6, "")


def test_padding_does_not_count() -> None:
    model, tokens = decoder("llama"), ids(1, 256)
    padded = torch.cat([torch.zeros_like(tokens), tokens], 1)
    mask = torch.cat([torch.zeros_like(tokens), torch.ones_like(tokens)], 1)
    plan = plan_cache(model, [{"input_ids": padded, "attention_mask": mask}], bits=9.0)
    assert plan.positions == 256


def test_layers_with_a_window_stay_as_they_are() -> None:
    model, data = decoder("gemma3"), [ids(1, 256)]
    plan = plan_cache(model, data, bits=9.0)
    assert (plan.count, plan.layers) == (2, (None, plan.choices[0].option.recipe))
    logits(model, ids(), AoCache(model.config, plan))


PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from cached_models import decoder, ids, logits
from ao_hf import AoCache, CachePlan
plan = CachePlan.load(sys.argv[2])
torch.manual_seed(0)
model, tokens = decoder("llama"), ids()
model.set_attn_implementation("ao_kv")
print(plan.layers, logits(model, tokens, AoCache(model.config, plan)).double().sum().item())
"""


@pytest.mark.slow
def test_another_process_reads_a_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = decoder("llama"), ids()
    plan = plan_cache(model, [ids(1, 256)], bits=9.1, candidates=("kv8", "kv4"))
    plan.save(tmp_path / "plan.json")
    done = run_python("-c", PROGRAM, Path(__file__).parent, tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    model.set_attn_implementation("ao_kv")
    found = logits(model, tokens, AoCache(model.config, kv=plan.layers)).double().sum().item()
    assert done.stdout.strip() == f"{plan.layers} {found}"


def test_json(tmp_path: Path) -> None:
    own = replace(KV_RECIPES["kv4"], rotate="none")
    plan = plan_cache(decoder("llama"), [ids(1, 128)], bits=9.0, candidates=("kv8", own))
    assert CachePlan.from_json(plan.to_json()) == plan
    good = plan.to_dict()
    choice = good["choices"][0]
    for change, message in (
        ({"ao_cache_plan": 2}, "ao_cache_plan=2"),
        ({"count": -1}, "plan.count"),
        ({"count": 1}, "its layers are 0, 1 of 1"),
        ({"choices": [{**choice, "picked": 9}]}, "picks option 9 of 3"),
        ({"uniform": [{**good["uniform"][0], "x": 1}]}, r"plan.uniform\[0\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            CachePlan.from_dict({**good, **change})
    with pytest.raises(UnknownNameError, match="kv9"):
        CachePlan.from_json(plan.to_json().replace('"kv8"', '"kv9"'))
    with pytest.raises(ConfigError, match=r"x.json is missing"):
        CachePlan.load(tmp_path / "x.json")


def made(losses: Sequence[Sequence[float]], together: Sequence[float], limit: float) -> CachePlan:
    """A plan of which nothing is chosen: exact layers of 16 bits, and two recipes of 8 and 4 bits."""
    sizes = (64.0, 32.0, 16.0)
    choices = [
        LayerChoice(i, 32, tuple(map(LayerOption, (None, "kv8", "kv4"), sizes, (0.0, *row))), 0)
        for i, row in enumerate(losses)
    ]
    uniform = [
        UniformCache(name, len(losses) * size, sum(row[i] for row in losses), together[i])
        for i, (name, size) in enumerate(zip(("kv8", "kv4"), sizes[1:], strict=True))
    ]
    return CachePlan(tuple(choices), len(losses), "bits", limit, 0.0, 100, tuple(uniform))


def test_losses_that_do_not_add_up() -> None:
    """The best that is measured is taken: one recipe for all, or what corrected losses lead to."""
    losses = [(0.1, 1.0), (0.1, 2.0)]
    assert chosen(made(losses, (0.2, 3.0), 6.0), lambda picks: 1.1).layers == ("kv4", "kv8")
    alike = chosen(made(losses, (0.2, 3.0), 8.0), lambda picks: 9.9)
    assert (alike.layers, alike.measured) == (("kv8", "kv8"), 0.2)
    worse = chosen(made(losses, (0.2, 3.0), 7.0), lambda picks: 5.0)
    assert (worse.layers, worse.measured) == (("kv4", "kv4"), 3.0)
    assert worse.taken is not None
    # with all layers in kv8 ten times of the sum is lost: one exact layer and one in kv4 lose less
    losses, seen = [(1.0, 1.7), (1.0, 1.9)], []

    def error(picks: Sequence[int]) -> float:
        seen.append(tuple(picks))
        return 1.0 if 0 in picks else 30.0

    found = chosen(made(losses, (20.0, 50.0), 10.0), error)
    assert found.layers == ("kv4", None)
    assert (2, 0) in seen


def test_what_is_refused() -> None:
    model, data = decoder("llama"), [ids(1, 128)]
    t5, inputs = sequence("t5")
    other = torch.nn.Linear(2, 2)
    for call, kind, message in (
        (lambda: plan_cache(model, data), ConfigError, "exactly one of bits, .*; found none"),
        (lambda: plan_cache(model, data, bits=9, max_kl=1), ConfigError, "bits=9, max_kl=1"),
        (lambda: plan_cache(model, data, bits=0), ConfigError, "bits=0: give a positive"),
        (lambda: plan_cache(model, data, bits=6), ConfigError, "smallest .* is 6.125 bits per"),
        (
            lambda: plan_cache(model, data, bytes_per_token=48),
            ConfigError,
            "bytes_per_token=48 cannot be met: .* 49 bytes per token",
        ),
        (
            lambda: plan_cache(model, [ids(1, 127)], bits=9),
            ConfigError,
            r"data\[0\] has 127 tokens",
        ),
        (lambda: plan_cache(model, [], bits=9), ConfigError, "data is empty"),
        (lambda: plan_cache(model, [(ids(),)], bits=9), ConfigError, r"data\[0\]="),
        (lambda: plan_cache(model.model, data, bits=9), ConfigError, "model=.*no logits"),
        (lambda: plan_cache(other, data, bits=9), ConfigError, "model=.*a model of transformers"),
        (lambda: plan_cache(t5, [inputs], bits=9), ConfigError, "model=.*it has an encoder"),
        (lambda: plan_cache(model, data, bits=9, candidates=["kv9"]), UnknownNameError, "kv9"),
        (lambda: plan_cache(model, data, bits=9, candidates="kv8"), ConfigError, "give a list"),
        (
            lambda: plan_cache(model, data, bits=9, candidates=["exact"]),
            ConfigError,
            "at least one",
        ),
        (
            lambda: plan_cache(model, data, bits=9, candidates=["kv8", KVCacheConfig(window=3)]),
            ConfigError,
            "windows of 3, 128 tokens",
        ),
    ):
        with pytest.raises(kind, match=message):
            call()
    plan = plan_cache(model, data, bits=9)
    with pytest.raises(ConfigError, match="kv has 2 recipes, and this model has 3 layers"):
        AoCache(decoder("llama", num_hidden_layers=3).config, plan)
    with torch.no_grad():
        model.lm_head.weight[0] = torch.nan
    with pytest.raises(QuantizationError, match="NaN or inf, with exact keys and values"):
        plan_cache(model, data, bits=9)
