"""sentence-transformers with a quantized encoder, offline; `nox -s evaluate` installs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1")

import pytest
import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import ao_hf
from ao_core import QTensor, load_model, open_checkpoint, quantize_, save_model

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "small", "model", "of", "words", "cat")
SENTENCES = ["a small model", "a model of words", "cat", "small small cat of a model of words"]


def encoder(folder: Path) -> Any:
    """A small random BERT with mean pooling; the same weights at every call."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=80, max_position_embeddings=16,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    modules = [Transformer(str(folder)), Pooling(48)]
    return sentence_transformers.SentenceTransformer(modules=modules, device="cpu")


@pytest.mark.parametrize("recipe", ["int8_weight_only", "nf4_weight_only"])
def test_quantized(recipe: str, tmp_path: Path) -> None:
    """Embeddings are those of the quantized encoder, also after saving and loading."""
    model = encoder(tmp_path / "bert")
    dense = torch.from_numpy(model.encode(SENTENCES))
    quantize_(model, recipe)
    assert any(isinstance(p, QTensor) for p in model.parameters())
    made = torch.from_numpy(model.encode(SENTENCES))
    assert not torch.equal(made, dense)
    assert (torch.cosine_similarity(made, dense) > 0.95).all()

    inputs = model.tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model[0].auto_model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    expected = (hidden * mask).sum(1) / mask.sum(1)
    assert torch.allclose(made, expected, atol=1e-5)

    save_model(model, tmp_path / "parameters")
    other = encoder(tmp_path / "bert")
    load_model(other, tmp_path / "parameters")
    assert torch.equal(torch.from_numpy(other.encode(SENTENCES)), made)

    source = model
    for name in ("saved", "again"):  # what was loaded is saved once more
        source.save_pretrained(str(tmp_path / name))
        source = sentence_transformers.SentenceTransformer(str(tmp_path / name), device="cpu")
        assert any(isinstance(p, QTensor) for p in source.parameters())
        assert torch.equal(torch.from_numpy(source.encode(SENTENCES)), made)
    saved, again = (open_checkpoint(tmp_path / name) for name in ("saved", "again"))
    assert saved.records == again.records
    assert saved.slots.keys() == again.slots.keys()
    for name in saved.slots:
        assert torch.equal(saved.read(name).view(-1), again.read(name).view(-1))


def test_quantized_while_loading(tmp_path: Path) -> None:
    """A dense folder, and a configuration of ao as an argument of the model."""
    encoder(tmp_path / "bert").save_pretrained(str(tmp_path / "dense"))
    expected = sentence_transformers.SentenceTransformer(str(tmp_path / "dense"), device="cpu")
    quantize_(expected, "int8_weight_only")
    config = ao_hf.AoConfig("int8_weight_only")
    made = sentence_transformers.SentenceTransformer(
        str(tmp_path / "dense"), device="cpu", model_kwargs={"quantization_config": config}
    )
    assert any(isinstance(p, QTensor) for p in made.parameters())
    assert (made.encode(SENTENCES) == expected.encode(SENTENCES)).all()
