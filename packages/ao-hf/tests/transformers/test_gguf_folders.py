"""Folders of transformers become GGUF files and come back, with transformers' own loader as the oracle."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from ao_core import Spec, dequantize_, quantize_checkpoint, quantize_tensor
from ao_core.ext import CheckpointError
from ao_core.ext.saving import write_checkpoint
from ao_quant import GGUFWeightOnlyConfig
from ao_quant.gguf import read_gguf
from ao_quant.interchange import convert_checkpoint
from ao_quant.interchange.sources import open_foreign

KINDS = {
    "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {"head_dim": 128},
    "gemma3_text": {"head_dim": 256}, "mixtral": {"num_local_experts": 2},
}  # fmt: skip
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "tie_word_embeddings": False,
    "initializer_range": 0.1,
}  # fmt: skip
IDS = torch.arange(2, 22).reshape(2, 10)


def _folder(kind, place):
    config = transformers.AutoConfig.for_model(kind, **SIZES | KINDS[kind])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.requires_grad_(False).named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(parameter, std=0.1).add_(name.endswith("norm.weight"))
    model.half().save_pretrained(place)
    letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:61], "He"]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(letters)}, []))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(place)
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_to_gguf_and_back_with_its_bytes(kind, tmp_path) -> None:
    """transformers' own loader of GGUF, which dequantizes, is the oracle of names, rows and metadata."""
    _folder(kind, tmp_path / "src")
    quantize_checkpoint(tmp_path / "src", tmp_path / "ao", GGUFWeightOnlyConfig("q8_0"))
    there = convert_checkpoint(tmp_path / "ao", tmp_path / "gguf", "gguf")
    assert there.verdict == "bytes equal"
    if kind != "mixtral":  # transformers makes a Llama without experts of such a file
        _check_logits(tmp_path)
    back = convert_checkpoint(tmp_path / "gguf", tmp_path / "back", "ao")
    assert back.verdict == "bytes equal"
    one, other = (open_foreign(tmp_path / name) for name in ("ao", "back"))
    assert one.reading.weights.keys() == other.reading.weights.keys()
    for name, weight in one.reading.weights.items():
        a, b = weight.make(), other.reading.weights[name].make()
        assert torch.equal(a.dequantize(torch.float32), b.dequantize(torch.float32)), name
    for name in one.dense:
        assert torch.equal(one.source.take(name).float(), other.source.take(name).float()), name
    kept = json.loads((tmp_path / "back/config.json").read_text())
    assert kept["hidden_size"] == 64


def _check_logits(tmp_path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "gguf", gguf_file="model.gguf", dtype=torch.float32
    )
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ao", dtype=torch.float32
    )
    dequantize_(expected)
    with torch.no_grad():
        found, wanted = theirs.eval()(IDS).logits, expected(IDS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_rotary_frequencies_of_llama_3(tmp_path) -> None:
    place = _folder("llama", tmp_path / "src")
    config = json.loads((place / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config))
    quantize_checkpoint(place, tmp_path / "ao", GGUFWeightOnlyConfig("q8_0"))
    convert_checkpoint(tmp_path / "ao", tmp_path / "gguf", "gguf")
    factors = read_gguf(tmp_path / "gguf/model.gguf").tensors["rope_freqs.weight"]
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    inverse = 500000.0 ** -(torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(inverse / factors, model.model.rotary_emb.inv_freq)


def test_other_integers_and_what_gguf_does_not_hold(tmp_path) -> None:
    place = _folder("llama", tmp_path / "src")
    gate = "model.layers.0.mlp.gate_proj.weight"
    opened = open_foreign(place)
    dense = {name: opened.source.take(name) for name in opened.source.forms}
    specs = {
        "int4 of 64": (Spec("int4", (1, 64), "float16", layout="packed"), "values equal", "q4_0"),
        "int3": (Spec("int3", (1, 32), "float16", layout="packed"), "values equal", "q4_0"),
        "uint4": (Spec("uint4", (1, 32), "float16", "int", "packed"), "re-gridded", "q4_1"),
        "bf16": (Spec("int8", (1, 32), "bfloat16"), "values equal", "q8_0"),
        "odd": (Spec("int8", (1, 16), "float16"), "re-gridded", "q8_0"),
    }
    for name, (spec, verdict, kind) in specs.items():
        folder = tmp_path / name
        write_checkpoint((dense | {gate: quantize_tensor(dense[gate], spec)}).items(), folder)
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(place / file, folder / file)
        told = convert_checkpoint(folder, tmp_path / f"{name}.out", "gguf")
        assert (told.verdict, told.verdicts[0].name) == (verdict, gate), name
        found = read_gguf(tmp_path / f"{name}.out/model.gguf").tensors["blk.0.ffn_gate.weight"]
        assert kind[:2] == "q" + str(found.format.bits), name
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match="model_type='gpt2'"):
        convert_checkpoint(folder, tmp_path / "none", "gguf")
