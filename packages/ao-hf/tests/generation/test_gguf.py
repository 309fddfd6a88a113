"""GGUF files of language models, with transformers' own loader, which dequantizes them, as the oracle."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
import transformers
from gguf_files import KINDS, TYPES, write

from ao_core import QTensor, dequantize_
from ao_core.ext import CheckpointError, ConfigError, MissingExtraError
from ao_hf.generation import Workload, draft_of, generate, load, measure, tokens_of
from ao_hf.generation.models import is_quantized
from ao_hf.generation.worker import contender

IDS = torch.arange(3, 43).reshape(2, 20)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf", tie_word_embeddings=True)


def relative(actual, expected):
    expected = expected.detach().double()
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", KINDS)
def test_logits_are_those_of_the_dequantized_model(tmp_path, architecture, tied):
    # transformers' loader scales the queries of Gemma 3 for heads of 256 always
    sizes = {"head_dim": 256} if architecture == "gemma3" else {}
    path = write(tmp_path / "a.gguf", architecture, tie_word_embeddings=tied, **sizes)
    loaded = load(path, device="cpu", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32
    )
    expected = theirs.eval()(IDS).logits
    assert relative(loaded.model(IDS).logits, expected) < 1e-5
    matrices = [p for p in loaded.model.parameters() if p.dim() == 2]
    assert all(isinstance(p, QTensor) for p in matrices)
    assert len({p.spec.dtype for p in matrices}) == len(TYPES)
    ours, other = loaded.model.config, theirs.config
    assert ours.tie_word_embeddings == tied
    for name in ("rms_norm_eps", "max_position_embeddings", "vocab_size", "bos_token_id"):
        assert getattr(ours, name) == pytest.approx(getattr(other, name)), name


def test_text_is_that_of_the_dequantized_model(file):
    loaded = load(file, device="cpu", dtype="float32")
    assert (loaded.name, loaded.quantized, loaded.recipe) == ("small.gguf", True, None)
    written = generate(loaded, "Hello", max_new_tokens=12)
    dense = load(file, device="cpu", dtype="float32")
    dequantize_(dense.model)
    assert generate(dense, "Hello", max_new_tokens=12).tokens == written.tokens
    assert tokens_of(loaded, "Hello", chat=False).shape == (1, 4)  # "He" is one token
    assert loaded.model.generation_config.eos_token_id == [1, 2]
    assert load(file, device="cpu").model.dtype == torch.bfloat16
    draft = draft_of(loaded, "int8")
    assert generate(loaded, "Hello", max_new_tokens=12, draft=draft).tokens == written.tokens


def test_saved_as_a_folder(file, tmp_path):
    loaded = load(file, device="cpu", dtype="float32")
    loaded.model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, loaded.model(IDS).logits)
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert all(kind in str(entry["config"]) for kind in TYPES)


def test_commands(ao, file, tmp_path):
    short = ("--device", "cpu", "--dtype", "float32")
    result = ao("generate", file, "Hello", "--max-new-tokens", "5", *short)
    assert result.exit_code == 0, result.output
    expected = generate(load(file, device="cpu", dtype="float32"), "Hello", max_new_tokens=5)
    assert result.stdout == expected.text + "\n"
    refused = ao("generate", file, "Hello", "--recipe", "int8_weight_only", *short)
    assert "is quantized by 'gguf' already" in refused.stderr
    dense = write(tmp_path / "dense.gguf", dense=True, tie_word_embeddings=True)
    text = tmp_path / "text.txt"
    text.write_text("Some words of a text. " * 9)
    sizes = ("--text", text, "--tokens", "64", "--window", "32", "--chunks", "8")
    result = ao("eval", file, "--original", dense, *sizes, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "small.gguf" in result.stdout
    unknown = ao("eval", file, *sizes, "--device", "cpu")
    assert "name what it was made of by --original" in unknown.stderr


def test_contenders_of_bench(file):
    dense, blocks = (
        contender(str(file), None, None, "cpu", "bfloat16", dense=x) for x in (True, False)
    )
    rows = measure({"bfloat16": dense, file.name: blocks}, [Workload(8, 4)], rounds=1)
    assert rows[1].weights_bytes < rows[0].weights_bytes / 2
    assert is_quantized(file)


def test_dense_files(tmp_path):
    path = write(tmp_path / "dense.gguf", dense=True)
    loaded = load(path, device="cpu")
    assert (loaded.model.dtype, loaded.quantized, loaded.name) == (torch.float32, False, "float32")
    quantized = load(path, "int8_weight_only", device="cpu")
    assert quantized.name == "int8_weight_only"
    assert relative(quantized.model(IDS).logits, loaded.model(IDS).logits) < 0.05


def _llama_3(width, theta):
    """How Llama 3.1 divides its frequencies, by the definition that Meta published."""
    factors = []
    for i in range(0, width, 2):
        length = 2 * math.pi * theta ** (i / width)
        smooth = (8192 / length - 1) / 3
        long = 8.0 if length > 8192 else 1 / ((1 - smooth) / 8 + smooth)
        factors.append(1.0 if length < 2048 else long)
    return torch.tensor(factors)


def test_rotary_embeddings(tmp_path):
    theta, path = 500000.0, tmp_path / "a.gguf"
    base = {"llama.rope.freq_base": theta}
    frequencies = _llama_3(128, theta)
    model = load(write(path, more=base, extra=frequencies), device="cpu").model
    assert model.config.rope_parameters["rope_type"] == "llama3"
    inverse = theta ** -(torch.arange(0, 128, 2) / 128)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, inverse / frequencies)
    write(path, more=base, extra=torch.ones(64))
    assert load(path, device="cpu").model.config.rope_parameters["rope_type"] == "default"
    write(path, more=base, extra=frequencies.flip(0))
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight has other values"):
        load(path, device="cpu")
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    scaling["llama.rope.scaling.original_context_length"] = 128
    found = load(write(path, more=scaling), device="cpu").model.config.rope_parameters
    assert (found["rope_type"], found["factor"]) == ("yarn", 4.0)
    assert found["original_max_position_embeddings"] == 128


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.block_count": None}, r"'llama.block_count' is None"),
        ({"llama.block_count": 3}, r"has no tensor for model.layers.2"),
        ({"llama.block_count": 1}, r"tensors that the model has no place for: model.layers.1"),
        ({"llama.feed_forward_length": 256}, r"has the shape \(512, 256\).*\(256, 256\)"),
        ({"llama.rope.dimension_count": 64}, r"rotary embeddings of 64 of 128"),
        ({"llama.expert_count": 8}, r"has 8 experts"),
        ({"split.count": 2}, r"is one of 2 parts"),
        ({"tokenizer.ggml.eot_token_id": "x"}, r"'tokenizer.ggml.eot_token_id' is 'x'"),
        ({"llama.rope.scaling.type": "longrope"}, r"rope.scaling.type is 'longrope'"),
        ({"tokenizer.ggml.model": "bert"}, r"no tokenizer.*keys of tokenizer.ggml"),
        (
            {"general.architecture": "phi9"},
            r"architecture is 'phi9'.*llama, qwen2, qwen3, gemma, gemma3",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_loaded(tmp_path, more, message):
    path = write(tmp_path / "a.gguf", more=more)
    with pytest.raises(CheckpointError, match=message):
        load(path, device="cpu")


def test_what_is_missing(file, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"or a GGUF file, of which it has small.gguf"):
        load(file.parent, device="cpu")
    with pytest.raises(CheckpointError, match="no such folder or file"):
        load(tmp_path / "none.gguf", device="cpu")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"ao-quant\[gguf\]"):
        load(file, device="cpu")
    with pytest.raises(ConfigError, match="dtype='int8'"):
        load(file, device="cpu", dtype="int8")
