"""Small models of diffusers with random weights, and their folders."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import diffusers
import pytest
import transformers

import ao_hf  # noqa: F401  # registers ao

diffusers.utils.logging.disable_progress_bar()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def trials():
    """The module that tries architectures."""
    spec = importlib.util.spec_from_file_location(
        "diffusers_architectures", Path(__file__).with_name("architectures.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def named(trials):
    """An architecture by its name."""
    return {architecture.name: architecture for architecture in trials.ARCHITECTURES}


@pytest.fixture
def sd3(named):
    return named["SD3Transformer2DModel"]


@pytest.fixture
def dense(sd3, tmp_path):
    """The folder of a dense model."""
    sd3.make().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def run(trials, sd3):
    """What a model of that architecture computes."""
    return lambda model: trials.outputs(model, sd3.inputs())


@pytest.fixture
def files():
    """The bytes of all files in a folder."""

    def found(folder: Path) -> dict[str, bytes]:
        every = sorted(file for file in folder.rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in every}

    return found


@pytest.fixture(scope="session")
def pipeline(named, tmp_path_factory):
    """The folder of a pipeline, which no test changes."""
    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    text = transformers.CLIPTextConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    made = diffusers.StableDiffusionPipeline(
        vae=named["AutoencoderKL"].make(),
        unet=named["UNet2DConditionModel"].make(),
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=transformers.CLIPTokenizer(
            vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=8
        ),
        scheduler=diffusers.DDIMScheduler(
            num_train_timesteps=10, clip_sample=False, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    folder = tmp_path_factory.mktemp("pipeline") / "dense"
    made.save_pretrained(folder)
    return folder
