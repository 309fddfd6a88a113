"""Shapes with random weights: the same bytes as a model that is loaded, and what does not fit is computed."""

from __future__ import annotations

import json

import pytest
import torch

from ao_core import QTensor
from ao_core.ext import MissingExtraError, UnknownNameError
from ao_hf.generation import Workload, runner_of
from ao_hf.generation.caches import cache_bytes, make_cache
from ao_hf.generation.machine import free_memory
from ao_hf.generation.passes import Pass, measure_passes, pass_runner
from ao_hf.generation.presets import (
    PRESETS,
    cache_bytes_of,
    find_preset,
    random_model,
    skeleton,
    stored_bytes,
)
from ao_hf.generation.presets.images import (
    _of_cogvideox,
    _of_flux,
    _of_unet,
    diffusion,
    segmentation,
)
from ao_hf.generation.presets.language import language

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 64,
}  # fmt: skip
TEXTS = {
    "small": language("llama", SIZES),
    "tied": language("llama", SIZES | {"tie_word_embeddings": True}),
    "experts": language("mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
#: the inputs are those of the large ones, so other sizes would be refused
IMAGES = {
    "sam": segmentation(
        {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64,
            "global_attn_indexes": [1], "image_size": 64, "patch_size": 16, "window_size": 2,
        }
    ),
    "unet": diffusion(
        "UNet2DConditionModel",
        _of_unet,
        {
            "sample_size": 8, "block_out_channels": (32, 64), "cross_attention_dim": 48,
            "norm_num_groups": 8, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2), "attention_head_dim": (2, 4),
            "use_linear_projection": True, "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
        },
    ),
    "flux": diffusion(
        "FluxTransformer2DModel",
        lambda model, batch: _of_flux(4, 5, model, batch),
        {
            **HEADS, "in_channels": 16, "num_layers": 1, "num_single_layers": 1,
            "joint_attention_dim": 32, "pooled_projection_dim": 40, "axes_dims_rope": (4, 4, 8),
            "guidance_embeds": True,
        },
    ),
    "cogvideox": diffusion(
        "CogVideoXTransformer3DModel",
        _of_cogvideox,
        {
            **HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "time_embed_dim": 24,
            "text_embed_dim": 40, "sample_width": 8, "sample_height": 8, "sample_frames": 5,
            "max_text_seq_length": 5, "use_rotary_positional_embeddings": True,
        },
    ),
}  # fmt: skip
SMALL = {**TEXTS, **IMAGES}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("ao_hf.generation.presets.table.PRESETS", PRESETS | SMALL)


def same_bytes(name, recipe, model):
    # in the layouts of files: those of kernels may have tables next to the codes
    stored = [
        p.canonical().stored_bytes if isinstance(p, QTensor) else p.nbytes
        for p in model.parameters()
    ]
    return stored_bytes(name, recipe) == sum(stored)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("recipe", [None, "int8_weight_only", "int4_weight_only"])
def test_a_model_has_the_bytes_that_are_computed(name, recipe):
    loaded = random_model(name, recipe, device="cpu")
    parameters = list(loaded.model.parameters())
    assert same_bytes(name, recipe, loaded.model)
    weight = loaded.model.model.layers[1].self_attn.q_proj.weight
    assert isinstance(weight, QTensor) == (recipe is not None)
    assert len({id(p) for p in parameters}) == len(parameters)
    sample = runner_of(loaded)(Workload(6, 3))
    assert sample.decode > 0
    assert torch.isfinite(loaded.model(torch.ones(1, 3, dtype=torch.long)).logits).all()


@pytest.mark.parametrize("name", IMAGES)
def test_a_forward_pass_has_the_bytes_that_are_computed(name):
    state = torch.get_rng_state()
    models = {
        r: random_model(name, r, device="cpu")
        for r in (None, "int8_dynamic_activation_int8_weight")
    }
    forward, outputs = find_preset(name).forward, []
    for recipe, loaded in models.items():
        assert same_bytes(name, recipe, loaded.model)
        assert any(isinstance(p, QTensor) for p in loaded.model.parameters()) == bool(recipe)
        with torch.inference_mode():
            outputs.append(loaded.model(**forward.inputs(loaded.model, 2), return_dict=False)[0])
        assert torch.isfinite(outputs[-1]).all()
    assert torch.equal(torch.get_rng_state(), state)
    assert (outputs[0] - outputs[1]).norm() < 0.3 * outputs[0].norm()
    runners = {str(r): pass_runner(loaded, forward) for r, loaded in models.items()}
    dense, int8 = measure_passes(runners, [Pass(forward.unit, 2)], rounds=2)
    assert dense.rate.median == pytest.approx(2 / dense.seconds.median, rel=0.5)
    assert dense.times_baseline.median == 1
    assert int8.weights_bytes < dense.weights_bytes
    assert (int8.peak_resident > 1e7, int8.peak_allocated) == (True, None)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-2-7b", 6.738), ("llama-3-8b", 8.030), ("llama-3.1-8b", 8.030), ("llama-3.2-1b", 1.236),
     ("mixtral-8x7b", 46.70), ("sam-vit-h", 0.641), ("sdxl-unet", 2.567), ("flux-dev", 11.90),
     ("cogvideox-5b", 5.57)],
)  # fmt: skip
def test_known_shapes_have_the_known_numbers_of_parameters(name, billions):
    assert stored_bytes(name) == pytest.approx(2e9 * billions, rel=0.003)


@pytest.mark.parametrize("kv", [None, "kv8", "kv4"])
def test_a_cache_has_the_bytes_that_are_computed(kv):
    model = random_model("small", device="cpu").model
    cache = make_cache(model, kv, 300)
    with torch.no_grad():
        model(torch.ones(2, 300, dtype=torch.long), past_key_values=cache)
    assert cache_bytes_of("small", kv, 2, 300) == cache_bytes(cache)
    # keys and values of 32 layers, 8 heads of 128, bfloat16
    assert cache_bytes_of("llama-3.1-8b", None, 1, 131072) == pytest.approx(17.18e9, rel=1e-4)


def test_no_preset_of_that_name(ao):
    with pytest.raises(UnknownNameError, match="Did you mean 'llama-3-8b'"):
        skeleton("llama-3-8")
    assert "Did you mean 'sdxl-unet'" in ao("bench", "sdxl-une").stderr


def test_a_package_that_a_preset_needs(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("ao_hf.generation.presets.images.import_module", absent)
    with pytest.raises(MissingExtraError, match=r"a FluxTransformer2DModel needs .*diffusers"):
        skeleton("flux")


ONE_ROUND = ("--rounds", "1", "--device", "cpu")


@pytest.fixture
def in_process(monkeypatch):
    from ao_hf.generation.worker import contender

    monkeypatch.setattr(
        "ao_hf.commands.contenders.started",
        lambda found, stack: {n: contender(**o) for n, o in found.items()},
    )


def test_the_command_on_a_forward_pass(ao, tmp_path, in_process):
    out = tmp_path / "out.json"
    result = ao(
        "bench", "unet", "--recipe", "int8_dynamic_activation_int8_weight", *ONE_ROUND, "--json", out
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "forward pass, 1 step" in result.stdout
    assert "steps/s" in result.stdout
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["contender"] for row in found["rows"]] == [
        "bfloat16",
        "int8_dynamic_activation_int8_weight",
    ]
    for option in (("--kv", "kv8"), ("--ragged",), ("--contexts", "8"), ("--prompt-lengths", "8")):
        refused = ao("bench", "unet", *option)
        assert refused.exit_code == 2
        assert f"{option[0]}: unet generates no text" in refused.stderr


def test_what_does_not_fit_is_computed(ao, tmp_path, monkeypatch, in_process):
    needed = stored_bytes("small", "int4_weight_only")
    cache = cache_bytes_of("small", None, 1, 12)
    assert needed + cache < stored_bytes("small")
    room = (needed + cache) / 0.9 + 100
    monkeypatch.setattr("ao_hf.generation.machine.free_memory", lambda device: room)
    out, text = tmp_path / "out.json", tmp_path / "out.md"
    options = (*ONE_ROUND, "--recipe", "int4_weight_only", "--prompt-lengths", "8", "--new-tokens", "3",
               "--contexts", "1,300", "--json", out, "--markdown", text)  # fmt: skip
    result = ao("bench", "small", *options)
    assert result.exit_code == 0, result.output
    assert "× int4_weight_only" in result.stdout
    first, second = text.read_text(encoding="utf-8").split("**batch")[1:]
    assert first.startswith(" of 1, after 1 random keys and values, prompt of 8 tokens")
    assert "| bfloat16 | not measured |" in first
    assert "computed" in first.split("| bfloat16")[1]
    assert "| int4_weight_only | 0." in first
    assert "| int4_weight_only | not measured |" in second  # its cache does not fit
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["contender"] for row in found["rows"]] == ["int4_weight_only"]
    missing = found["not_measured"]
    assert [(x["contender"], x["workload"]["filled"]) for x in missing] == [
        ("bfloat16", 1), ("bfloat16", 300), ("int4_weight_only", 300)
    ]  # fmt: skip
    assert missing[0]["weights_bytes"] == stored_bytes("small")
    assert missing[2]["cache_bytes"] == cache_bytes_of("small", None, 1, 311)
    monkeypatch.setattr("ao_hf.generation.machine.free_memory", lambda device: 1000)
    nothing = ao("bench", "small", *options)
    assert nothing.exit_code == 0, nothing.output
    assert "| int4_weight_only | not measured |" in text.read_text(encoding="utf-8")


def test_free_memory():
    assert 1e7 < free_memory("cpu") < 1e14
