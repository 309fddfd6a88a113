"""Shapes of models that cut, draw and film; sizes are those that the authors published.

Inputs are those of the launch tables: pictures of 1024 × 1024, and 49 frames of 480 × 720. A model that is
guided by a prompt draws each picture twice, with the prompt and without: its batch has twice as many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.ext import MissingExtraError
from ao_hf.generation.models import transformers_of_ao
from ao_hf.generation.presets.records import Forward, Preset

__all__ = ["IMAGES", "diffusion", "segmentation"]


def segmentation(sizes: Mapping[str, Any]) -> Preset:
    """A Segment Anything model of transformers; `sizes` are fields of the configuration of its encoder."""
    return Preset(partial(_sam, sizes), Forward("image", _one_point))


def diffusion(
    kind: str, inputs: Callable[[Any, int], dict[str, Any]], sizes: Mapping[str, Any]
) -> Preset:
    """The model of diffusers that takes a step.

    Args:
        kind: its class.
        inputs: as for `Forward`.
        sizes: arguments of the class.
    """
    return Preset(partial(_diffusers, kind, sizes), Forward("step", inputs))


def _sam(sizes: Mapping[str, Any], dtype: torch.dtype) -> Any:
    transformers = transformers_of_ao()
    side, patch = sizes["image_size"], sizes["patch_size"]
    prompts = {"image_size": side, "patch_size": patch, "image_embedding_size": side // patch}
    config = transformers.SamConfig(vision_config=dict(sizes), prompt_encoder_config=prompts)
    return transformers.AutoModelForMaskGeneration.from_config(config, dtype=dtype)


def _diffusers(kind: str, sizes: Mapping[str, Any], dtype: torch.dtype) -> Any:
    try:
        module = import_module("diffusers")
    except ModuleNotFoundError as error:
        name = error.name or "diffusers"
        raise MissingExtraError(name, "ao-hf[diffusers]", f"a {kind}") from error
    # not its own `to`, which speaks of modules that stay in float32 although these have none
    return nn.Module.to(getattr(module, kind)(**sizes), dtype)


# -- inputs ----------------------------------------------------------------------------------------


def _random(model: Any, *shape: int) -> Tensor:
    """The same numbers for every contender."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return made.to(model.device, model.dtype)


def _one_point(model: Any, batch: int) -> dict[str, Any]:
    """Pictures, and a point in the middle of each."""
    sizes = model.config.vision_config
    middle = torch.full((batch, 1, 1, 2), sizes.image_size / 2.0)
    return {
        "pixel_values": _random(model, batch, sizes.num_channels, sizes.image_size, sizes.image_size),
        "input_points": middle.to(model.device, model.dtype),
    }  # fmt: skip


def _of_unet(model: Any, batch: int) -> dict[str, Any]:
    """Guided; as the pipeline of SDXL gives them: a prompt of 77 tokens, its pooled state, and six sizes."""
    sizes, rows = model.config, 2 * batch
    pooled = sizes.projection_class_embeddings_input_dim - 6 * sizes.addition_time_embed_dim
    return {
        "sample": _random(model, rows, sizes.in_channels, sizes.sample_size, sizes.sample_size),
        "timestep": torch.tensor(500, device=model.device),
        "encoder_hidden_states": _random(model, rows, 77, sizes.cross_attention_dim),
        "added_cond_kwargs": {
            "text_embeds": _random(model, rows, pooled),
            "time_ids": torch.full(
                (rows, 6), 1024.0, device=model.device, dtype=model.dtype
            ),
        },
    }  # fmt: skip


def _of_flux(side: int, words: int, model: Any, batch: int) -> dict[str, Any]:
    """Not guided: the strength of the guidance is an input. `side` of a picture in patches of 16 × 16."""
    sizes = model.config
    places = torch.cartesian_prod(
        torch.zeros(1), torch.arange(side) * 1.0, torch.arange(side) * 1.0
    )
    return {
        "hidden_states": _random(model, batch, side * side, sizes.in_channels),
        "encoder_hidden_states": _random(model, batch, words, sizes.joint_attention_dim),
        "pooled_projections": _random(model, batch, sizes.pooled_projection_dim),
        "timestep": torch.full((batch,), 0.5, device=model.device, dtype=model.dtype),
        "guidance": torch.full((batch,), 3.5, device=model.device, dtype=torch.float32),
        "img_ids": places.to(model.device, model.dtype),
        "txt_ids": torch.zeros(words, 3, device=model.device, dtype=model.dtype),
    }


def _of_cogvideox(model: Any, batch: int) -> dict[str, Any]:
    """Guided; the rotation of each token is that of some angle."""
    sizes, rows = model.config, 2 * batch
    frames = (sizes.sample_frames - 1) // sizes.temporal_compression_ratio + 1
    patches = frames * sizes.sample_height * sizes.sample_width // sizes.patch_size**2
    angles = _random(model, patches, sizes.attention_head_dim).float()
    size = (frames, sizes.in_channels, sizes.sample_height, sizes.sample_width)
    return {
        "hidden_states": _random(model, rows, *size),
        "encoder_hidden_states": _random(model, rows, sizes.max_text_seq_length, sizes.text_embed_dim),
        "timestep": torch.full((rows,), 500, device=model.device),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }  # fmt: skip


IMAGES = {
    "sam-vit-h": segmentation(
        {
            "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "mlp_dim": 5120,
            "global_attn_indexes": [7, 15, 23, 31], "image_size": 1024, "patch_size": 16,
        },
    ),
    "sdxl-unet": diffusion(
        "UNet2DConditionModel",
        _of_unet,
        {
            "sample_size": 128, "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20),
            "use_linear_projection": True, "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
        },
    ),
    "flux-dev": diffusion(
        "FluxTransformer2DModel", partial(_of_flux, 64, 512), {"guidance_embeds": True}
    ),
    "cogvideox-5b": diffusion(
        "CogVideoXTransformer3DModel",
        _of_cogvideox,
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
    ),
}  # fmt: skip
