"""Pipelines: components with configurations of their own, quantized while they are loaded or in files."""

import io
import json
import logging
import shutil
import sys
from importlib.metadata import entry_points

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.quantizers import PipelineQuantizationConfig

from ao_core import QTensor
from ao_core.ext import CheckpointError, ConfigError
from ao_hf import AoConfig
from ao_hf.diffusers import quantize_pipeline

CONFIGS = {"unet": "int8_weight_only", "text_encoder": "int4_weight_only"}


def image(pipe):
    pipe.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "pt"}
    return pipe("a red cat", **options, generator=torch.Generator().manual_seed(0)).images


def load(folder, **options):
    return DiffusionPipeline.from_pretrained(folder, **options)


def formats(pipe):
    """The format of a weight of each component, and whether one of the VAE is quantized."""
    unet, text = pipe.unet.mid_block.attentions[0].proj_in, pipe.text_encoder
    linear = next(m for m in text.modules() if isinstance(m, torch.nn.Linear))
    quantized = any(isinstance(p, QTensor) for p in pipe.vae.parameters())
    return unet.weight.spec.dtype, linear.weight.spec.dtype, quantized


def test_components_have_their_own(pipeline, tmp_path, files):
    before = files(pipeline)
    mapping = {name: AoConfig(config) for name, config in CONFIGS.items()}
    made = load(pipeline, quantization_config=PipelineQuantizationConfig(quant_mapping=mapping))
    assert formats(made) == ("int8", "uint4", False)
    expected = image(made)
    made.save_pretrained(tmp_path / "q")
    again = load(tmp_path / "q")
    assert torch.equal(image(again), expected)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(image(load(tmp_path / "again")), expected)

    reports = quantize_pipeline(pipeline, tmp_path / "files", CONFIGS)
    assert reports.keys() == CONFIGS.keys()
    assert torch.equal(image(load(tmp_path / "files")), expected)
    index = "model_index.json"
    assert (tmp_path / "files" / index).read_bytes() == (pipeline / index).read_bytes()
    # a run that was killed before its last step goes on, and is not taken for one of something else
    (tmp_path / "files" / index).unlink()
    with pytest.raises(ConfigError, match="has unet quantized by 'int8_weight_only'"):
        quantize_pipeline(pipeline, tmp_path / "files", {"unet": "nf4_weight_only"})
    assert quantize_pipeline(pipeline, tmp_path / "files", CONFIGS) == reports
    assert files(pipeline) == before


def test_one_for_all(pipeline):
    config = PipelineQuantizationConfig(
        quant_backend="ao",
        quant_kwargs={"config": "int8_weight_only"},
        components_to_quantize=["unet", "text_encoder"],
    )
    assert formats(load(pipeline, quantization_config=config)) == ("int8", "int8", False)


def test_a_component_that_is_not_there(pipeline, tmp_path):
    with pytest.raises(ConfigError, match=r"'unett', which is no component.*Did you mean 'unet'"):
        quantize_pipeline(pipeline, tmp_path / "q", {"unett": "int8_weight_only"})
    with pytest.raises(ConfigError, match="'scheduler', which is no component with safetensors"):
        quantize_pipeline(pipeline, tmp_path / "q", {"scheduler": "int8_weight_only"})
    with pytest.raises(ConfigError, match="name components to quantize; there are text_encoder"):
        quantize_pipeline(pipeline, tmp_path / "q", {})
    assert not (tmp_path / "q").exists()


def test_diffusers_warns_of_it(pipeline):
    mapping = {"transformer": AoConfig("int8_weight_only")}
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    diffusers.utils.logging.add_handler(handler)
    try:
        load(pipeline, quantization_config=PipelineQuantizationConfig(quant_mapping=mapping))
    finally:
        diffusers.utils.logging.remove_handler(handler)
    assert "{'transformer'} will be ignored" in heard.getvalue()


def test_places_that_cannot_work(pipeline, tmp_path):
    config = {"unet": "int8_weight_only"}
    with pytest.raises(ConfigError, match="is in src"):
        quantize_pipeline(pipeline, pipeline / "q", config)
    with pytest.raises(CheckpointError, match=r"no model_index\.json"):
        quantize_pipeline(pipeline / "unet", tmp_path / "q", config)
    shutil.copytree(pipeline, tmp_path / "other")
    with pytest.raises(ConfigError, match="has a pipeline already"):
        quantize_pipeline(pipeline, tmp_path / "other", config)


@pytest.fixture
def ao(monkeypatch, capsys):
    """Run the command; returns its exit status and what it printed."""
    (command,) = entry_points(group="console_scripts", name="ao")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ao", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            command.load()()
        shown = capsys.readouterr()
        return end.value.code or 0, " ".join((shown.out + shown.err).split())

    return run


def test_the_command_line(pipeline, tmp_path, ao):
    """A component at a time; of a whole pipeline it says what to do."""
    code, text = ao("quantize", pipeline, tmp_path / "q", "--config", "int8_weight_only")
    assert code
    assert "components are quantized one by one" in text
    place = tmp_path / "unet"
    code, text = ao("quantize", pipeline / "unet", place, "--config", "int8_weight_only")
    assert not code
    assert "diffusers.UNet2DConditionModel.from_pretrained" in text
    made = diffusers.UNet2DConditionModel.from_pretrained(place)
    assert isinstance(made.mid_block.attentions[0].proj_in.weight, QTensor)
    entry = json.loads((place / "config.json").read_text())["quantization_config"]
    assert (entry["quant_method"], entry["config"]["name"]) == ("ao", "int8_weight_only")
    code, text = ao("inspect", place)
    assert not code
    assert "int8" in text
