"""The cache that `generate` of a fused model makes: which, when, and with the tokens of transformers' own."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fused_models import build, served_calls
from torch import Tensor
from transformers import DynamicCache

import ao_hf
from ao_core import QTensor
from ao_hf import AoCache
from ao_hf.cache.layers import AoLayer
from ao_hf.fusing.generating import GenerationCache, cache_refusal
from ao_hf.fusing.logits import FusedModel
from ao_hf.fusing.report import Fused, Kept
from ao_hf.fusing.runs import Run

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
    return served_calls(monkeypatch, FusedModel)


def made(model: Any, ids: Tensor = IDS, **options: Any) -> Any:
    """What `generate` returns, greedy but for `options`, with 9 new tokens."""
    options = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9, **options}
    return model.generate(ids, return_dict_in_generate=True, **options)


def own_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def goes_on(model: Any, text: Tensor, cache: Any) -> Tensor:
    """What follows a further turn after a text; padding that random weights generate is a token, too."""
    more = torch.cat([text, IDS], 1)
    options = {"attention_mask": torch.ones_like(more), "past_key_values": cache}
    found = made(model, more, **options)
    assert found.past_key_values is cache
    return found.sequences  # type: ignore[no-any-return]


PADDED = torch.ones(2, 7, dtype=torch.int64)
PADDED[0, :3] = 0


@pytest.mark.parametrize(
    ("options", "rows", "steps"),
    [
        ({}, 2, 8),
        ({"num_beams": 3, "num_return_sequences": 2}, 2, 8),
        ({"attention_mask": PADDED}, 2, 8),
        ({"max_new_tokens": 300, "min_new_tokens": 300}, 1, 298),  # grows once
    ],
    ids=["greedy", "beams", "padded", "grown"],
)
def test_tokens_are_those_of_transformers_cache(
    model: Any, served: list[bool], options: dict[str, Any], rows: int, steps: int
) -> None:
    ids = IDS[:rows]
    found = made(model, ids, **options)
    assert type(found.past_key_values) is AoCache
    assert found.past_key_values.is_exact
    assert sum(served) == steps  # all but the prompt, and a token for which memory is taken
    expected = made(model, ids, past_key_values=own_cache(model), **options)
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize("way", ["lookup", "assistant", "early exit"])
def test_drafts_keep_transformers_cache(model: Any, way: str) -> None:
    """Which is cropped, and whose states some drafts read; an exact one can be asked for."""
    ids = IDS[:1]
    options: dict[str, Any] = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "assistant": {"assistant_model": copy.deepcopy(model)},
        "early exit": {"assistant_early_exit": 1},
    }[way]
    expected = made(model, ids, past_key_values=own_cache(model))
    found = made(model, ids, **options)
    assert type(found.past_key_values) is DynamicCache
    assert torch.equal(found.sequences, expected.sequences)
    cache = AoCache(model.config, "exact")
    cropped = made(model, ids, past_key_values=cache, **options)
    assert torch.equal(cropped.sequences, expected.sequences)
    assert cache.get_seq_length() == expected.past_key_values.get_seq_length()


def test_samples_are_those_of_transformers_cache(model: Any) -> None:
    sequences = []
    for options in ({}, {"past_key_values": own_cache(model)}):
        torch.manual_seed(5)
        sequences.append(made(model, do_sample=True, top_k=20, **options).sequences)
    assert torch.equal(*sequences)


def test_threads_and_inference_mode(model: Any) -> None:
    expected = goes_on(model, made(model).sequences, own_cache(model))

    def run(_: int) -> Tensor:
        with torch.inference_mode():
            found = made(model)
        return goes_on(model, found.sequences.clone(), found.past_key_values)  # outside of it

    with ThreadPoolExecutor(2) as pool:
        assert all(torch.equal(found, expected) for found in pool.map(run, range(6)))


def test_turns_go_on_with_the_cache_and_each_generate_has_its_own(model: Any) -> None:
    first = made(model)
    again = made(model)
    assert torch.equal(first.sequences, again.sequences)
    assert first.past_key_values is not again.past_key_values
    turns = [
        goes_on(model, first.sequences, cache)
        for cache in (first.past_key_values, own_cache(model))
    ]
    assert torch.equal(*turns)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("Llama", {}), ("Qwen2", {}), ("Gemma", {"head_dim": 16})],
    ids=["Llama", "Qwen2", "Gemma"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_that_of_transformers_cache(
    kind: str, changes: Any, dtype: torch.dtype
) -> None:
    """Both sum in another order; with respect to float32, logits over neither are farther off."""
    model = build(kind, dtype, max_position_embeddings=512, **changes)
    exact = copy.deepcopy(model)
    for module in exact.modules():
        for name, x in list(module._parameters.items()):
            if x is not None:
                x = (x.dequantize() if isinstance(x, QTensor) else x.detach()).float()
                module._parameters[name] = torch.nn.Parameter(x, requires_grad=False)
    ids = torch.randint(3, 100, (2, 31))

    def steps(model: Any, cache: Any) -> Tensor:
        with torch.no_grad():
            made = [model(x, past_key_values=cache).logits for x in ids.split([7] + 24 * [1], 1)]
        return torch.cat(made, 1).double()

    expected, own = (steps(one, own_cache(one)) for one in (exact, model))
    assert ao_hf.fuse(model).cache == Fused("generate", GenerationCache.ops)
    found = steps(model, AoCache(model.config, "exact"))
    assert not torch.equal(found, own)
    error, theirs = ((x - expected).norm() for x in (found, own))
    assert error < 1.1 * theirs  # 0.92 to 1.05 for 12 draws of each
    assert theirs < 0.03 * expected.norm()


def test_memory_grows_with_the_text(model: Any) -> None:
    cache = made(model).past_key_values
    layer: Any = cache.layers[0]
    assert (layer.kv.tail_key.shape[2], layer.kv.key.shape[2]) == (256, 128)
    # no layer has blocks, so all share the memory for them
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
        model.compile()
        assert str(cache_refusal(model)).startswith(
            "a LlamaForCausalLM is compiled, or has another"
        )
        model._compiled_call_impl = None
        model.model.norm.forward = lambda x: x
        assert str(cache_refusal(model)).startswith("a LlamaRMSNorm is compiled, or has another")
        del model.model.norm.forward
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
    assert ao_hf.fuse(copy.deepcopy(model)).cache == Fused("generate", GenerationCache.ops)
    ao_hf.unfuse(model)
    assert "_prepare_cache_for_generation" not in vars(model)
    assert type(made(model).past_key_values) is DynamicCache


def test_a_model_that_computes_something_else_keeps_transformers_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Run.logits

    def wrong(self: Run, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        logits = own(self, x, kwargs)
        return None if logits is None else logits.roll(1, -1)

    monkeypatch.setattr(Run, "logits", wrong)
    model = build("Llama")
    report = ao_hf.fuse(model)
    assert isinstance(report.cache, Kept)
    assert report.cache.reason.endswith("% away from those over transformers' cache")
    assert type(made(model).past_key_values) is DynamicCache


def test_what_generate_returns_is_read_as_transformers_cache(model: Any) -> None:
    found = made(model).past_key_values
    expected = made(model, past_key_values=own_cache(model)).past_key_values
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[2] is theirs[2] is None
        for x, y in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(x, y)


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
