"""Folders that other projects quantized are loaded by `from_pretrained`, into ao's kernels."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from ao_core import QTensor, dequantize_, quantize_checkpoint
from ao_core.ext import CheckpointError, ConfigError
from ao_hf.transformers.foreign import take_over
from ao_quant import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig
from ao_quant.interchange import convert_checkpoint

IDS = torch.arange(1, 21).reshape(2, 10)
INT4 = Int4WeightOnlyConfig(32)
#: format -> what a weight is before it
FAMILIES = {
    "auto-round": INT4,
    "awq": INT4,
    "bitsandbytes": Int8WeightOnlyConfig(),
    "compressed-tensors": INT4,
    "fbgemm_fp8": Float8WeightOnlyConfig(),
    "fp8": Float8WeightOnlyConfig(),
    "gptq": INT4,
    "gptq_v2": INT4,
    "hqq": INT4,
    "modelopt": Float8WeightOnlyConfig(),
    "torchao": INT4,
}


@pytest.fixture
def folder(tmp_path, llama):
    """`folder(format)`: a folder of a small Llama in it."""

    def folder(name: str):
        model = llama(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
        model.half().save_pretrained(tmp_path / "src")
        quantize_checkpoint(tmp_path / "src", tmp_path / "ao", FAMILIES[name])
        convert_checkpoint(tmp_path / "ao", tmp_path / name, name)
        return tmp_path / name

    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_each_family(name, folder, tmp_path) -> None:
    place = folder(name)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    weights = [p for n, p in model.named_parameters() if n.endswith("proj.weight")]
    assert len(weights) == 14
    assert all(isinstance(weight, QTensor) for weight in weights)
    with torch.no_grad():
        found = model(IDS).logits
        tokens = model.generate(IDS, max_new_tokens=4, do_sample=False)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(again(IDS).logits, found)
    assert again.config.quantization_config.config["label"]
    dequantize_(model)
    with torch.no_grad():
        expected = model(IDS).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-2
    assert tokens.shape == (2, 14)


def test_experts_are_joined(tmp_path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).half()
    model.save_pretrained(tmp_path / "src")
    quantize_checkpoint(tmp_path / "src", tmp_path / "ao", INT4)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "ao", dtype=torch.float32)
    told = convert_checkpoint(tmp_path / "ao", tmp_path / "gptq", "gptq_v2")
    assert told.verdict == "values equal"
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "gptq", dtype=torch.float32)
    ids = IDS % 64
    assert isinstance(found.model.layers[0].mlp.experts.gate_up_proj, QTensor)
    assert torch.equal(found(ids).logits, expected(ids).logits)


def test_what_cannot_be_loaded(folder, tmp_path) -> None:
    place = folder("gptq")
    with pytest.raises(ConfigError, match="ao convert SRC DST --to ao"):
        AutoModelForCausalLM.from_pretrained(
            place, device_map={"": "disk"}, offload_folder=tmp_path
        )
    config = json.loads((tmp_path / "src/config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "src/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="says that it is quantized, and nothing in it"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "src")


def test_what_is_installed_keeps_its_folders(monkeypatch) -> None:
    known = {"gptq": "theirs", "hqq": "theirs"}
    found = lambda name: None if name == "hqq" else object()  # noqa: E731
    monkeypatch.setattr("ao_hf.transformers.foreign.find_spec", found)
    take_over(known)
    assert known["gptq"] == "theirs"
    assert known["hqq"] != "theirs"
    assert {"modelopt", "fp8"} <= known.keys()
