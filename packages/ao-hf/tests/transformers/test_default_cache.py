"""The cache that `generate` of a fused model makes: which, when, and with the tokens of transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fused_models import build
from torch import Tensor
from transformers import DynamicCache

import ao_hf
from ao_hf import AoCache
from ao_hf.cache.layers import AoLayer
from ao_hf.fusing.generating import GenerationCache, cache_refusal
from ao_hf.fusing.logits import FusedModel
from ao_hf.fusing.report import Fused, Kept

IDS = torch.arange(1, 15).reshape(2, 7)


@pytest.fixture
def model() -> Any:
    found = build("Llama", max_position_embeddings=512)
    report = ao_hf.fuse(found)
    assert report.cache == Fused("generate", GenerationCache.ops)
    assert "exact AoCache, where no cache is asked for" in str(report)
    return found


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a fused model, whether one op served it."""
    found: list[bool] = []
    own = FusedModel.run

    def run(self: FusedModel, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        found.append(out is not NotImplemented)
        return out

    monkeypatch.setattr(FusedModel, "run", run)
    return found


def made(model: Any, ids: Tensor = IDS, **options: Any) -> Any:
    """What `generate` returns, greedy but for `options`, with 9 new tokens."""
    options = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9, **options}
    return model.generate(ids, return_dict_in_generate=True, **options)


def own_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


PADDED = torch.ones(2, 7, dtype=torch.int64)
PADDED[0, :3] = 0


@pytest.mark.parametrize(
    ("options", "rows", "steps"),
    [
        ({}, 2, 8),
        ({"num_beams": 3, "num_return_sequences": 2}, 2, 8),
        ({"attention_mask": PADDED}, 2, 8),
        ({"prompt_lookup_num_tokens": 3}, 1, None),  # checks several tokens, and crops
        ({"max_new_tokens": 300, "min_new_tokens": 300}, 1, 298),  # grows once
    ],
    ids=["greedy", "beams", "padded", "cropped", "grown"],
)
def test_tokens_are_those_of_transformers_cache(
    model: Any, served: list[bool], options: dict[str, Any], rows: int, steps: int | None
) -> None:
    ids = IDS[:rows]
    found = made(model, ids, **options)
    assert type(found.past_key_values) is AoCache
    assert found.past_key_values.is_exact
    if steps is not None:
        assert sum(served) == steps  # all but the prompt, and a token for which memory is taken
    expected = made(model, ids, past_key_values=own_cache(model), **options)
    assert torch.equal(found.sequences, expected.sequences)


def test_turns_go_on_with_the_cache_and_each_generate_has_its_own(model: Any) -> None:
    first = made(model)
    again = made(model)
    assert torch.equal(first.sequences, again.sequences)
    assert first.past_key_values is not again.past_key_values
    more = torch.cat([first.sequences, IDS], 1)
    found = made(model, more, past_key_values=first.past_key_values)
    assert found.past_key_values is first.past_key_values
    assert torch.equal(
        found.sequences, made(model, more, past_key_values=own_cache(model)).sequences
    )


def test_memory_grows_with_the_text(model: Any) -> None:
    cache = made(model).past_key_values
    layer: Any = cache.layers[0]
    assert (layer.kv.tail_key.shape[2], layer.kv.key.shape[2]) == (256, 128)
    # all layers share the memory for blocks, of which there are none
    assert layer.kv.key is cache.layers[1].kv.key
    with torch.no_grad():
        model(torch.ones(2, 400, dtype=torch.int64), past_key_values=cache)
    assert layer.kv.tail_key.shape[2] == 1024 + 128  # 415 tokens and 512 more, in whole blocks
    assert (layer.kv.tokens, layer.kv.coded) == (415, 0)
    cache.crop(-410)
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(*layer.dense(layer.kv)[0])
    report = cache.report()
    assert report.layers[0].key == "float32"
    assert report.layers[0].bytes_per_token == 2 * 2 * 16 * 4  # keys and values of two heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_after_the_tokens_is_not_read(dtype: torch.dtype) -> None:
    model = build("Llama", dtype)
    ao_hf.fuse(model)

    def run(fill: float) -> Tensor:
        cache = AoCache(model.config, "exact")
        out = []
        with torch.no_grad():
            for tokens in (IDS, *IDS.T[:4, :, None]):
                out.append(model(tokens, past_key_values=cache).logits[:, -1])
                for layer in cache.layers:
                    for tail in (layer.kv.tail_key, layer.kv.tail_value):
                        tail[:, :, layer.kv.tokens :] = fill
        return torch.stack(out)

    assert torch.equal(run(0.0), run(float("nan")))


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static"},
        {"past_key_values": "kv8"},
    ],
    ids=str,
)
def test_who_asks_for_a_cache_gets_it(model: Any, options: dict[str, Any]) -> None:
    if "past_key_values" in options:
        options = {"past_key_values": AoCache(model.config, "kv8")}
    found = made(model, **options).past_key_values
    assert not isinstance(found, AoCache) or found is options["past_key_values"]
    assert (found is None) == ("use_cache" in options)


def test_reasons_against_it(model: Any) -> None:
    with torch.no_grad():
        assert cache_refusal(model) is None
        model.set_attn_implementation("eager")
        assert (
            cache_refusal(model)
            == "the attention of the model is 'eager', neither 'sdpa' nor 'ao_kv'"
        )
        assert type(made(model).past_key_values) is DynamicCache
        model.set_attn_implementation("sdpa")
        model.train()
        assert cache_refusal(model) == "the model is in training mode"
        model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            assert cache_refusal(model) == "autocast is on"
        forward = vars(model.model.layers[1]).pop("forward")
        assert str(cache_refusal(model)).startswith("blocks are fused no longer")
        model.model.layers[1].forward = forward
        assert cache_refusal(model) is None
    assert cache_refusal(model) == "gradients are recorded"


def test_copies_and_models_that_are_not_fused_have_their_own(model: Any) -> None:
    for other in (copy.deepcopy(model), build("Llama")):
        assert str(cache_refusal(other)).startswith("ao_hf.fuse(model) has not made one run")
        assert type(made(other).past_key_values) is DynamicCache
    assert torch.equal(made(copy.deepcopy(model)).sequences, made(model).sequences)
    ao_hf.unfuse(model)
    assert "_prepare_cache_for_generation" not in vars(model)
    assert type(made(model).past_key_values) is DynamicCache


def test_layers_that_see_a_window_keep_transformers_cache() -> None:
    model = build(
        "Qwen2", use_sliding_window=True, sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    report = ao_hf.fuse(model)
    assert isinstance(report.cache, Kept)
    assert type(made(model).past_key_values) is DynamicCache
    # a run over the layers that keep everything is not for "sdpa", whose cache has others too
    cache = AoCache(model.config, "exact")
    found = made(model, past_key_values=cache)
    assert {type(x) for x in cache.layers} > {AoLayer}
    assert torch.equal(found.sequences, made(model).sequences)
