# %% [markdown]
"""Quantize a diffusion pipeline, draw with it, save it, and load it again.

Without arguments it takes a tiny pipeline with random weights, which draws noise in a few seconds. Give the
folder of a pipeline in the layout of diffusers to take that one.
"""

# %% [markdown]
# # Quantize a diffusion pipeline
#
# A pipeline has several models: text encoders, the model that removes noise, and a VAE. Most of the
# weights are in the second one, and each can have a format of its own. `import ao_hf` makes formats
# of ao known to diffusers and to transformers.

# %%
import sys
import tempfile
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.quantizers import PipelineQuantizationConfig

from ao_core import open_checkpoint
from ao_core.ext.numerics import sqnr
from ao_hf import AoConfig, memory_footprint
from ao_hf.diffusers import quantize_pipeline

diffusers.utils.logging.disable_progress_bar()
transformers.logging.disable_progress_bar()
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A pipeline
#
# This tiny one stands for what you downloaded: random weights, and a vocabulary of letters.

# %%
# a notebook has arguments of its own
given = [] if "ipykernel" in sys.modules else sys.argv[1:]
if given:
    source = Path(given[0])
else:
    source = folder / "pipeline"
    torch.manual_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    text = transformers.CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
    )
    diffusers.StableDiffusionPipeline(
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=transformers.CLIPTokenizer(
            vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=16
        ),
        unet=diffusers.UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(32, 64),
            layers_per_block=1,
            cross_attention_dim=64,
            attention_head_dim=8,
            norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(16, 32),
            norm_num_groups=8,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(source)


def draw(pipe: DiffusionPipeline) -> torch.Tensor:
    """An image from the same noise each time, (3, height, width)."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    size = None if given else 32
    made = pipe(
        "a red cat",
        num_inference_steps=4,
        height=size,
        width=size,
        generator=generator,
        output_type="pt",
    )
    return made.images[0]


dense = DiffusionPipeline.from_pretrained(source)
expected = draw(dense)

# %% [markdown]
# ## Quantize while loading
#
# `quant_mapping` has a configuration for each component that shall be quantized: one in 8 bits, one
# in 4. The VAE is kept. Weights are quantized as they are read, so that no two of them are dense at
# a time.

# %%
mapping = {
    "unet": AoConfig("int8_weight_only"),
    "text_encoder": AoConfig("int4_weight_only"),
}
quantized = DiffusionPipeline.from_pretrained(
    source, quantization_config=PipelineQuantizationConfig(quant_mapping=mapping)
)
image = draw(quantized)

# %% [markdown]
# ## What it costs and what it saves
#
# The memory of each component, and how far the image is from that of the dense pipeline.

# %%
print(f"{'component':14} {'dense MB':>10} {'quantized MB':>14}")
for name in ("text_encoder", "unet", "vae"):
    sizes = [memory_footprint(getattr(pipe, name)) / 1e6 for pipe in (dense, quantized)]
    print(f"{name:14} {sizes[0]:10.3f} {sizes[1]:14.3f}")
difference = float(sqnr(expected, image))
print(f"signal to quantization noise of the image: {difference:.1f} dB")

# %% [markdown]
# ## Save and load
#
# The folder has the quantized weights. It loads without a configuration, in any program that
# imports ao_hf, and draws the same image to the last bit.

# %%
quantized.save_pretrained(folder / "quantized")
again = DiffusionPipeline.from_pretrained(folder / "quantized")
assert torch.equal(draw(again), image)

# %% [markdown]
# ## Without loading the pipeline
#
# `quantize_pipeline` goes from files to files, one weight at a time, and copies everything else. A
# pipeline that is larger than memory can be quantized so. The result is the same.

# %%
configs = {"unet": "int8_weight_only", "text_encoder": "int4_weight_only"}
reports = quantize_pipeline(source, folder / "files", configs)
files = DiffusionPipeline.from_pretrained(folder / "files")
assert torch.equal(draw(files), image)
for name, report in reports.items():
    print(f"{name}: {report.coverage:.1f} % of the bytes are quantized")
print(f"{len(open_checkpoint(folder / 'files' / 'unet').records)} weights of the unet in {folder}")
