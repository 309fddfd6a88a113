"""What cannot work says so, and the folder that it was asked of is as it was."""

import json

import pytest
import torch
from diffusers import SD3Transformer2DModel as Model

from ao_core import FqnToConfig, quantize_
from ao_core.ext import CheckpointError, ConfigError, QuantizationError, UnknownNameError, registry
from ao_hf import AoConfig
from ao_hf.diffusers import attach
from ao_quant import quantize_checkpoint

INT8 = AoConfig("int8_weight_only")


@pytest.fixture
def quantized(dense, tmp_path):
    model = Model.from_pretrained(dense, quantization_config=INT8)
    model.save_pretrained(tmp_path / "q", max_shard_size="80KB")
    return tmp_path / "q"


@pytest.fixture
def refused(files):
    def check(folder, error, match, model=Model, **options):
        before = files(folder)
        with pytest.raises(error, match=match):
            model.from_pretrained(folder, **options)
        assert files(folder) == before

    return check


def test_an_unknown_recipe():
    with pytest.raises(UnknownNameError, match="Did you mean 'int8_weight_only'"):
        AoConfig("int8_weight_onli")


def test_names_of_nothing(dense, refused):
    config = AoConfig("int8_weight_only", modules_to_not_convert=["proj_uot"])
    refused(dense, ConfigError, "'proj_uot' is the name of no module", quantization_config=config)
    config = AoConfig(FqnToConfig({"nothing": "int8_weight_only"}))
    refused(dense, ConfigError, "matches no parameter", quantization_config=config)


def test_a_recipe_that_needs_data(dense, refused):
    config = AoConfig("int8_static_activation_int8_weight")
    refused(dense, ConfigError, "data=batches", quantization_config=config)


def test_the_disk_is_no_device(dense, refused, tmp_path):
    place = {"": "cpu", "proj_out": "disk"}
    refused(dense, ConfigError, '"disk"', quantization_config=INT8, device_map=place)


def test_weights_that_are_not_finite(tmp_path, sd3, refused):
    model = sd3.make()
    model.proj_out.weight.data[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    refused(tmp_path / "nan", QuantizationError, "proj_out.weight", quantization_config=INT8)


def test_another_method_reads_its_own(dense, tmp_path, refused):
    file = dense / "config.json"
    entry = {"quantization_config": {"quant_method": "gguf"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | entry))
    with pytest.raises(CheckpointError, match="by 'gguf' already"):
        quantize_checkpoint(dense, tmp_path / "out", "int8_weight_only")
    assert not (tmp_path / "out").exists()


def test_what_is_quantized(quantized, tmp_path):
    with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
        model = Model.from_pretrained(quantized, quantization_config=AoConfig("int4_weight_only"))
    assert model.proj_out.weight.spec.dtype == "int8"


@pytest.mark.parametrize("shards", [True, False], ids=["shards", "one file"])
def test_a_truncated_file(quantized, dense, tmp_path, shards):
    if not shards:
        Model.from_pretrained(quantized).save_pretrained(quantized := tmp_path / "one")
    shard = sorted(quantized.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-8])
    # of one file, diffusers reads everything before it asks
    error = (CheckpointError, f"{shard.name}: truncated") if shards else (OSError, shard.name)
    with pytest.raises(error[0], match=error[1]):
        Model.from_pretrained(quantized)


def test_bytes_that_changed(quantized):
    shard = sorted(quantized.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        Model.from_pretrained(quantized)


def test_a_missing_plugin(quantized, monkeypatch, refused):
    table = registry.dtypes
    inside = type(table).__contains__
    monkeypatch.setattr(
        type(table), "__contains__", lambda self, name: name != "int8" and inside(self, name)
    )
    refused(quantized, CheckpointError, "needs the dtype 'int8'")


def test_no_pickle(quantized):
    model = Model.from_pretrained(quantized)
    with pytest.raises(ConfigError, match="safe_serialization=False"):
        model.save_pretrained(quantized, safe_serialization=False)


def test_another_model(quantized, refused):
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"joint_attention_dim": 64}))
    refused(quantized, ValueError, "context_embedder.weight")


def test_attach_needs_something_quantized(dense):
    with pytest.raises(ConfigError, match="no parameter that is quantized"):
        attach(Model.from_pretrained(dense), INT8)


def test_weights_in_low_precision_training_are_dense_ones(named):
    model = named["SD3Transformer2DModel"].make()
    quantize_(model, "bitnet_training")
    assert not hasattr(model, "hf_quantizer")
    assert "quantization_config" not in model.config
