"""What cannot work says so, and the folder that it was asked of is as it was."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ao_core import FqnToConfig, dequantize_, quantize_
from ao_core.ext import CheckpointError, ConfigError, UnknownNameError, registry
from ao_core.ext.quantizing import NothingConvertedWarning
from ao_hf import AoConfig, attach
from ao_quant import quantize_checkpoint


@pytest.fixture
def quantized(dense, tmp_path):
    config = AoConfig("int8_weight_only")
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    model.save_pretrained(tmp_path / "q", max_shard_size="8KB")
    return tmp_path / "q"


@pytest.fixture
def refused(contents):
    def check(folder, error, match, **options):
        before = contents(folder)
        with pytest.raises(error, match=match):
            AutoModelForCausalLM.from_pretrained(folder, **options)
        assert contents(folder) == before

    return check


def test_an_unknown_recipe():
    with pytest.raises(UnknownNameError, match="Did you mean 'int8_weight_only'"):
        AoConfig("int8_weight_onli")


@pytest.mark.parametrize("names", ["lm_head", [1]])
def test_names_that_are_no_list(names):
    with pytest.raises(ConfigError, match="modules_to_not_convert.*cannot work"):
        AoConfig("int8_weight_only", modules_to_not_convert=names)


def test_names_of_nothing(dense, refused):
    config = AoConfig("int8_weight_only", modules_to_not_convert=["lm_hed"])
    refused(dense, ConfigError, "'lm_hed' is the name of no module", quantization_config=config)
    config = AoConfig(FqnToConfig({"model.nothing": "int8_weight_only"}))
    refused(dense, ConfigError, "matches no parameter", quantization_config=config)


def test_a_recipe_that_needs_data(dense, refused):
    config = AoConfig("int8_static_activation_int8_weight")
    refused(dense, ConfigError, r"data=batches", quantization_config=config)


@pytest.mark.parametrize("recipe", ["float8_training", "bitnet_training"])
def test_low_precision_training_is_in_no_file(dense, refused, recipe):
    config = AoConfig(
        FqnToConfig({"model.layers.0.mlp.up_proj": recipe, "lm_head": "nf4_weight_only"})
    )
    refused(dense, ConfigError, f"config='{recipe}' trains.*Trainer", quantization_config=config)


def test_the_disk_is_no_device(dense, refused):
    config = AoConfig("int8_weight_only")
    place = {"model": "cpu", "lm_head": "disk"}
    refused(
        dense, ConfigError, 'device_map has "disk"', quantization_config=config, device_map=place
    )


def test_weights_that_are_not_finite(tmp_path, llama, refused):
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    config = AoConfig("int8_weight_only")
    refused(tmp_path / "nan", RuntimeError, "conversion", quantization_config=config)


OTHERS = {
    "gptq": ({"bits": 4}, "gptqmodel"),
    "awq": ({"bits": 4}, "gptqmodel"),
    "bitsandbytes": ({"load_in_4bit": True}, "bitsandbytes"),
    "compressed-tensors": ({"format": "pack-quantized"}, "compressed-tensors"),
    "torchao": ({"quant_type": {"default": {}}}, "torchao"),
    "fp8": ({}, "transformers reads"),
    # transformers does not know it and would leave it out
    "modelopt": ({}, "vLLM"),
}


@pytest.mark.parametrize("method", OTHERS)
def test_another_method_reads_its_own(dense, tmp_path, refused, method):
    fields, reader = OTHERS[method]
    file = dense / "config.json"
    config = {"quantization_config": {"quant_method": method} | fields}
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    # ao reads it, by a class of its own, where the package of the method is not installed
    says = "Config but you are passing a AoConfig"
    refused(dense, ValueError, says, quantization_config=AoConfig("int8_weight_only"))
    with pytest.raises(CheckpointError, match=f"by '{method}' already, which .*{reader}"):
        quantize_checkpoint(dense, tmp_path / "out", "int8_weight_only")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
    ],
)
def test_older_forms_of_other_methods(dense, tmp_path, fields, method):
    file = dense / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(CheckpointError, match=f"by '{method}' already"):
        quantize_checkpoint(dense, tmp_path / "out", "int8_weight_only")


def test_quantizing_what_is_quantized(quantized):
    config = AoConfig("int4_weight_only")
    with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
        model = AutoModelForCausalLM.from_pretrained(quantized, quantization_config=config)
    assert model.lm_head.weight.spec.dtype == "int8"


def test_a_truncated_shard(quantized):
    shard = sorted(quantized.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{shard.name}: truncated"):
        AutoModelForCausalLM.from_pretrained(quantized)


def test_a_missing_shard(quantized, refused):
    sorted(quantized.glob("*.safetensors"))[1].unlink()
    refused(quantized, CheckpointError, "model-00002-of-00008.safetensors: is missing")


def test_a_model_that_transformers_does_not_know(dense, refused):
    file = dense / "config.json"
    file.write_text(file.read_text().replace('"llama"', '"llamma"'))
    refused(dense, ValueError, "llamma", quantization_config=AoConfig("int8_weight_only"))


def test_a_missing_tokenizer(dense, tmp_path):
    quantize_checkpoint(dense, tmp_path / "q", "int8_weight_only")
    AutoModelForCausalLM.from_pretrained(tmp_path / "q")  # the model needs none
    with pytest.raises((OSError, ValueError)):
        AutoTokenizer.from_pretrained(tmp_path / "q")


def test_a_missing_plugin(quantized, monkeypatch, refused):
    table = registry.dtypes
    inside = type(table).__contains__
    monkeypatch.setattr(
        type(table), "__contains__", lambda self, name: name != "int8" and inside(self, name)
    )
    refused(quantized, CheckpointError, "needs the dtype 'int8'")


def test_a_newer_version_and_what_is_none():
    with pytest.raises(ConfigError, match="version=2.*upgrade ao-hf"):
        AoConfig.from_dict({"quant_method": "ao", "version": 2, "config": {}})
    with pytest.raises(ConfigError, match="is not one of ao"):
        AoConfig.from_dict({"quant_method": "ao", "bits": 4})


def test_attach_needs_something_quantized(dense):
    model = AutoModelForCausalLM.from_pretrained(dense)
    with pytest.raises(ConfigError, match="no parameter that is quantized"):
        attach(model, AoConfig("int8_weight_only"))


@pytest.fixture
def loaded(dense):
    """A model as the quantizer of another method leaves it."""
    model = AutoModelForCausalLM.from_pretrained(dense)
    config = SimpleNamespace(quant_method=SimpleNamespace(value="gguf"))
    model.hf_quantizer, model.is_quantized = SimpleNamespace(quantization_config=config), True
    return model


def test_a_model_that_another_method_dequantized_is_dense(loaded, tokens, tmp_path):
    quantize_(loaded, "int8_weight_only")
    loaded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.quantization_config.quant_method == "ao"
    assert torch.equal(again(tokens).logits, loaded(tokens).logits)


def test_a_model_with_weights_of_another_method_is_its_own(loaded):
    norm = loaded.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.data.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="is quantized by gguf already"):
        quantize_(loaded, "int8_weight_only")


def test_weights_that_are_trained_are_known_as_such(dense):
    model = AutoModelForCausalLM.from_pretrained(dense)
    quantize_(model, "bitnet_training")
    assert not hasattr(model, "hf_quantizer")  # what is stored is dense
    quantize_(other := AutoModelForCausalLM.from_pretrained(dense), "int8_weight_only_training")
    assert other.hf_quantizer.is_qat_trainable
    quantize_(third := AutoModelForCausalLM.from_pretrained(dense), "int8_weight_only")
    assert not third.hf_quantizer.is_qat_trainable


def test_models_that_share_a_configuration(tokens, llama, tmp_path):
    """Quantizing one says nothing of the other, which is saved dense and quantized while it is loaded."""
    first = llama()
    other = type(first)(first.config)
    quantize_(first, "int8_weight_only")
    assert {id(module.config) for module in first.modules() if hasattr(module, "config")} == {
        id(first.config)
    }
    other.save_pretrained(tmp_path / "other")
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "other"), "quantization_config")
    config = AoConfig("int8_weight_only")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "other", quantization_config=config)
    quantize_(other.eval(), "int8_weight_only")
    assert torch.equal(loaded(tokens).logits, other(tokens).logits)


def test_a_dense_folder_that_claims_to_be_quantized(dense):
    file = dense / "config.json"
    entry = {"quantization_config": AoConfig("int8_weight_only").to_dict()}
    file.write_text(json.dumps(json.loads(file.read_text()) | entry))
    with pytest.warns(NothingConvertedWarning, match="all its weights are dense"):
        AutoModelForCausalLM.from_pretrained(dense)


def test_a_model_that_is_dense_again(dense, tmp_path):
    """It is saved as any dense one."""
    model = AutoModelForCausalLM.from_pretrained(dense)
    quantize_(model, "int8_weight_only")
    dequantize_(model)
    model.save_pretrained(tmp_path / "again")
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "again"), "quantization_config")
    AutoModelForCausalLM.from_pretrained(tmp_path / "again")
