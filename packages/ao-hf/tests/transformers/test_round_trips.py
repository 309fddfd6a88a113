"""Quantized on the fly, by `quantize_` or by `ao quantize`: one model, one format, any number of times."""

import copy

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from ao_core import FqnToConfig, QTensor, load_model, open_checkpoint, quantize_, verify_checkpoint
from ao_hf import AoConfig
from ao_quant import Int8StaticActivationInt8WeightConfig, quantize_checkpoint

#: one scale for all tokens, also where random weights lose much by it
STATIC = Int8StaticActivationInt8WeightConfig(max_error_ratio=100.0)
MIXED = FqnToConfig(
    {
        "model.embed_tokens": "int8_weight_only",
        "re:.*mlp.down_proj": None,
        "re:.*mlp.*": "int8_dynamic_activation_int8_weight",
        "*": "int4_weight_only",
    }
)


@pytest.fixture
def contents(contents):
    """Without the model card, which only the first save knows reasons for."""

    def check(folder):
        found = contents(folder)
        assert b"## Quantization" in found.pop("README.md")
        return found

    return check


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize(
    "config",
    ["nf4_weight_only", MIXED],
    ids=["nf4", "mixed"],
)
def test_three_ways_give_one_format(tmp_path, llama, contents, tokens, config, tied):
    llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "dense")
    dense = load(tmp_path / "dense")
    expected = dense(tokens).logits

    on_the_fly = load(tmp_path / "dense", quantization_config=AoConfig(config))
    report = quantize_(dense, config)
    logits = on_the_fly(tokens).logits
    assert torch.equal(logits, dense(tokens).logits)
    assert 1e-4 < (logits - expected).norm() / expected.norm() < 0.3
    changed = {r.fqn for r in on_the_fly.hf_quantizer.report.with_status("changed")}
    assert changed == {r.fqn for r in report.with_status("changed")}
    assert len(changed) > 10
    assert on_the_fly.get_memory_footprint(return_buffers=False) == report.bytes_after
    if tied:
        assert on_the_fly.lm_head.weight is on_the_fly.model.embed_tokens.weight

    on_the_fly.save_pretrained(tmp_path / "fly", max_shard_size="8KB")
    dense.save_pretrained(tmp_path / "alone", max_shard_size="8KB")
    assert contents(tmp_path / "fly") == contents(tmp_path / "alone")
    assert len(list((tmp_path / "fly").glob("*.safetensors"))) > 3

    again = load(tmp_path / "fly")
    assert torch.equal(again(tokens).logits, logits)
    again.save_pretrained(tmp_path / "again", max_shard_size="8KB")
    assert contents(tmp_path / "again") == contents(tmp_path / "fly")

    quantize_checkpoint(tmp_path / "dense", tmp_path / "files", config)
    assert torch.equal(load(tmp_path / "files")(tokens).logits, logits)
    other = llama(tie_word_embeddings=tied)
    load_model(other, tmp_path / "fly")
    assert torch.equal(other(tokens).logits, logits)
    assert not any(file.problem for file in verify_checkpoint(tmp_path / "fly"))
    entries, made = (open_checkpoint(tmp_path / name).entries for name in ("fly", "files"))
    assert {n: (e.spec, e.dtype, e.shape) for n, e in entries.items()} == {
        n: (e.spec, e.dtype, e.shape) for n, e in made.items()
    }


@pytest.mark.parametrize("place", ["cpu", "auto", {"": "cpu"}], ids=["cpu", "auto", "map"])
def test_device_map(dense, contents, tokens, tmp_path, place):
    first = load(dense, quantization_config=AoConfig("int8_weight_only"), device_map=place)
    first.save_pretrained(tmp_path / "q")
    second = load(tmp_path / "q", device_map=place)
    assert torch.equal(second(tokens).logits, first(tokens).logits)
    second.save_pretrained(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "q")


def test_dtype_is_the_logical_one(dense, tokens, tmp_path):
    config = AoConfig("int4_weight_only")
    made = load(dense, quantization_config=config, dtype=torch.bfloat16)
    weight = made.model.layers[0].mlp.up_proj.weight
    assert made.dtype == weight.dtype == torch.bfloat16
    made.save_pretrained(tmp_path / "q")
    again = load(tmp_path / "q")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again(tokens).logits, made(tokens).logits)
    wide = load(tmp_path / "q", dtype=torch.float32)
    assert wide.model.layers[0].mlp.up_proj.weight.dtype == wide.dtype == torch.float32
    assert torch.equal(wide.model.layers[0].mlp.up_proj.weight.qdata, weight.qdata)


def test_a_model_without_its_head_takes_the_same_folder(dense, tokens, tmp_path):
    made = load(dense, quantization_config=AoConfig("int8_weight_only"))
    made.save_pretrained(tmp_path / "q")
    body = AutoModel.from_pretrained(tmp_path / "q")
    assert isinstance(body.layers[0].mlp.up_proj.weight, QTensor)
    assert torch.equal(body(tokens)[0], made.model(tokens)[0])


def test_calibrated_after_loading(dense, tokens, tmp_path):
    model = load(dense)
    quantize_(model, STATIC, data=[tokens, tokens + 1])
    assert model.is_quantized
    assert model.config.quantization_config.quant_method == "ao"
    model.save_pretrained(tmp_path / "q")
    assert torch.equal(load(tmp_path / "q")(tokens).logits, model(tokens).logits)


def test_a_wrapped_model_is_saved_as_what_it_is(dense, tokens, tmp_path):
    model = load(dense)
    # as sentence-transformers wrap it
    quantize_(torch.nn.ModuleDict({"first": model}), "int8_weight_only")
    model.save_pretrained(tmp_path / "q")
    assert torch.equal(load(tmp_path / "q")(tokens).logits, model(tokens).logits)
    assert not hasattr(model.model, "hf_quantizer")


def test_two_configurations_in_turn_are_both_named(dense):
    model = load(dense, quantization_config=AoConfig(MIXED, modules_to_not_convert=["layers.1"]))
    quantize_(model, "int8_weight_only")
    entry = model.config.to_dict()["quantization_config"]
    names = [step["name"] for step in entry["config"]["sequence"]]
    assert names == ["fqn_to_config", "int8_weight_only"]
    assert entry["modules_to_not_convert"] == ["layers.1"]
    assert AoConfig.from_dict(entry).to_dict() == entry


def test_dequantized_it_is_an_ordinary_model(dense, tokens, tmp_path):
    model = load(dense, quantization_config=AoConfig("int8_weight_only"))
    logits = model(tokens).logits
    plain = model.dequantize()
    assert not plain.is_quantized
    assert not hasattr(plain.config, "quantization_config")
    torch.testing.assert_close(plain(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    assert plain.get_memory_footprint() == load(dense).get_memory_footprint()
    plain.save_pretrained(tmp_path / "plain")
    assert torch.equal(load(tmp_path / "plain")(tokens).logits, plain(tokens).logits)


def test_a_copy_counts_its_own_memory(dense):
    model = load(dense, quantization_config=AoConfig("int8_weight_only"))
    other = copy.deepcopy(model)
    small = other.get_memory_footprint()
    other.dequantize()
    assert model.get_memory_footprint() == small < other.get_memory_footprint()
