"""Adapters of PEFT on quantized models, by the methods of diffusers."""

import peft
import pytest
import torch

from ao_core import QTensor
from ao_core.ext import ConfigError
from ao_core.ext.numerics import sqnr
from ao_hf import AoConfig


@pytest.fixture
def adapted(dense, sd3):
    config = AoConfig("int8_weight_only")
    model = type(sd3.make()).from_pretrained(dense, quantization_config=config)
    model.add_adapter(
        peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    return model


def test_saved_and_loaded(adapted, dense, sd3, run, tmp_path):
    expected = run(adapted)
    adapted.save_lora_adapter(tmp_path / "adapter")
    config = AoConfig("int8_weight_only")
    model = type(adapted).from_pretrained(dense, quantization_config=config)
    plain = run(model)
    model.load_lora_adapter(str(tmp_path / "adapter"), prefix=None, use_safetensors=True)
    assert torch.equal(run(model), expected)
    assert not torch.equal(plain, expected)
    model.unload_lora()
    model.save_pretrained(tmp_path / "q")
    assert torch.equal(run(type(model).from_pretrained(tmp_path / "q")), plain)


def test_fused(adapted, run):
    expected = run(adapted)
    adapted.fuse_lora()
    assert float(sqnr(expected, run(adapted))) > 25


def test_a_model_with_adapters_is_not_saved_whole(adapted, tmp_path):
    with pytest.raises(ConfigError, match="save_lora_adapter"):
        adapted.save_pretrained(tmp_path / "q")
    assert isinstance(adapted.proj_out.weight, QTensor)
