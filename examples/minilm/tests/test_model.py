"""The real model: its batches, its sharing copies, and the variants made of it."""

from __future__ import annotations

import threading

import pytest
import torch
from minilm_demo import minilm, variants
from torch import nn

from ao_core import QTensor, resolve_config

TEXTS = [
    "A cat sat on the mat.",
    "A kitten was sitting on a rug.",
    "The stock market fell by three percent on Tuesday.",
]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return minilm.load()


def test_vectors_are_unit_and_near_for_near_meanings(model: nn.Module) -> None:
    vectors = minilm.encode(model, minilm.tokenize(TEXTS, 32))
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))
    cosine = vectors @ vectors.T
    assert 0.5 < cosine[0, 1] < 0.9
    assert 0 < cosine[0, 2] < 0.2


def test_vectors_do_not_depend_on_the_batch(model: nn.Module) -> None:
    together = minilm.encode(model, minilm.tokenize(TEXTS, 32))
    alone = torch.cat([minilm.encode(model, minilm.tokenize([text], 32)) for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-6)


def test_batches_hold_every_text_once_and_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "_TOKENS_PER_BATCH", 64)
    texts = ["word " * (1 + 7 * i % 23) for i in range(50)]
    batches = minilm.tokenize(texts, 16)
    assert sorted(torch.cat([batch.rows for batch in batches]).tolist()) == list(range(50))
    assert all(batch.ids.numel() <= 64 and batch.ids.shape[1] <= 16 for batch in batches)
    lengths = [len(text.split()) + 2 for text in texts]
    for batch in batches:
        expected = [min(lengths[row], 16) for row in batch.rows.tolist()]
        assert batch.mask.sum(1).tolist() == expected


def test_the_longest_texts_are_taken_from_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "_TOKENS_PER_BATCH", 24)
    batches = minilm.tokenize(["word " * count for count in (9, 1, 8, 7, 2)], 32)
    assert len(batches[-1].ids) == 1
    found = minilm.longest(batches, 3)
    assert found.mask.sum(1).tolist() == [9, 10, 11]
    assert found.ids.shape == (3, 11)
    assert found.rows.tolist() == [0, 1, 2]
    (alone,) = minilm.tokenize(["word " * 9], 32)
    assert torch.equal(found.ids[-1:], alone.ids)
    assert len(minilm.longest(batches, 8).ids) == 5


def test_threads_compute_alone_and_leave_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with minilm.threads() as pool:
            both = threading.Barrier(2)  # passed only by two at a time
            assert sorted(pool.map(lambda _: both.wait(60), range(2))) == [0, 1]
            assert pool.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), minilm.threads() as pool:
            pool.submit(lambda: 1 // 0).result()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_every_parameter_is_loaded_from_the_package(model: nn.Module) -> None:
    assert sum(p.numel() for p in model.parameters()) == 22_713_216
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    assert not any(p.requires_grad for p in model.parameters())


def test_a_variant_leaves_the_original_alone_and_shares_the_rest(model: nn.Module) -> None:
    before = {name: id(p) for name, p in model.named_parameters()}
    config = resolve_config("int8_weight_only")
    made = variants.quantized(model, "int8", config, "", lambda *_: None)

    assert isinstance(made, variants.Variant)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    quantized = [n for n, p in made.model.named_parameters() if isinstance(p, QTensor)]
    assert len(quantized) == 37  # all linear layers, no embedding
    shared = [n for n, p in made.model.named_parameters() if id(p) == before[n]]
    assert len(shared) + len(quantized) == len(before)
    dense = sum(p.numel() for n, p in model.named_parameters() if n not in quantized)
    weights = 22_713_216 - dense
    size = variants.memory_bytes(made.model) - variants.memory_bytes(model) + 4 * weights
    assert 1.0 < size / weights < 1.02


def test_a_recipe_for_training_is_left_out(model: nn.Module) -> None:
    config = resolve_config("float8/rowwise")
    made = variants.quantized(model, "compute", config, "", lambda *_: None)
    assert made == "a recipe for training: its weights stay in high precision"


def test_embeddings_are_quantized_where_named(model: nn.Module) -> None:
    config, summary = variants.configs()[variants.SAVED]
    made = variants.quantized(model, variants.SAVED, config, summary, lambda *_: None)
    assert isinstance(made, variants.Variant)
    word = made.model.get_parameter("embeddings.word_embeddings.weight")
    assert isinstance(word, QTensor)
    assert word.spec.dtype == "int8"
    assert variants.memory_bytes(made.model) < 0.22 * variants.memory_bytes(model)


def test_in_bfloat16_keeps_the_codes(model: nn.Module) -> None:
    config = resolve_config("int4_weight_only")
    made = variants.quantized(model, "int4", config, "", lambda *_: None)
    assert isinstance(made, variants.Variant)
    cast = variants.in_bfloat16(made.model)
    name = "encoder.layer.0.attention.self.query.weight"
    before, after = made.model.get_parameter(name), cast.get_parameter(name)
    assert isinstance(before, QTensor)
    assert isinstance(after, QTensor)
    assert torch.equal(before.canonical().qdata, after.canonical().qdata)
    assert {p.dtype for p in cast.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
