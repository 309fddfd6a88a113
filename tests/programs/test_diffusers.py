"""Models of diffusers: quantized, run, saved and loaded, exported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from ao_core import dequantize_, load_model, quantize_, save_model
from ao_core.ext import StorageError
from ao_core.ext.numerics import sqnr


def _unet() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    inputs = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7])}
    return model, {**inputs, "encoder_hidden_states": torch.randn(2, 5, 32)}


def _sd3() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        out_channels=4,
    )
    inputs = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7])}
    return model, {
        **inputs,
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "pooled_projections": torch.randn(2, 32),
    }


def _flux() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model, {
        "hidden_states": torch.randn(2, 16, 16),
        "timestep": torch.tensor([0.3, 0.7]),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "pooled_projections": torch.randn(2, 32),
        "txt_ids": torch.zeros(5, 3),
        "img_ids": torch.zeros(16, 3),
    }


def _vae() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        norm_num_groups=8,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return model, {"sample": torch.randn(2, 3, 16, 16)}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "unet": _unet,
    "sd3": _sd3,
    "flux": _flux,
    "vae": _vae,
}


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["int8_weight_only", "int4_weight_only/g32-asymmetric"])
def test_model(name: str, recipe: str, tmp_path: Path) -> None:
    model, inputs = MODELS[name]()
    model.eval()
    untouched = copy.deepcopy(model)
    assert quantize_(model, recipe).with_status("changed")
    made = output(model, inputs)
    dense = copy.deepcopy(model)
    dequantize_(dense)
    assert float(sqnr(output(dense, inputs), made)) > 50
    save_model(model, tmp_path)
    load_model(untouched, tmp_path)
    assert torch.equal(output(untouched, inputs), made)


def test_writes_nothing_wrong(tmp_path: Path) -> None:
    model, _ = _sd3()
    quantize_(model, "int8_weight_only")
    with pytest.raises(StorageError, match=r"call ao_core\.save_model"):
        model.save_pretrained(tmp_path)


def test_exported() -> None:
    model, inputs = _sd3()
    quantize_(model.eval(), "int8_weight_only")
    program = torch.export.export(model, (), {**inputs, "return_dict": False})
    assert float(sqnr(output(model, inputs), program.module()(**inputs, return_dict=False)[0])) > 80


def test_adapter_fused() -> None:
    """`add_adapter` and `fuse_lora` of diffusers, over quantized weights."""
    import peft

    model, inputs = _sd3()
    quantize_(model.eval(), "int8_weight_only")
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    model.add_adapter(config)
    expected = output(model, inputs)
    model.fuse_lora()
    assert float(sqnr(expected, output(model, inputs))) > 25
