"""One format on disk, whatever wrote it; what a model says of itself; copies, devices, dtypes."""

import copy

import pytest
import torch
from torch import nn

from ao_core import (
    FqnToConfig,
    QTensor,
    load_model,
    open_checkpoint,
    quantize_,
    save_model,
    verify_checkpoint,
)
from ao_core.ext.numerics import sqnr
from ao_hf import AoConfig
from ao_hf.diffusers import attach, memory_footprint
from ao_hf.diffusers.devices import counted_as
from ao_quant import Int8StaticActivationInt8WeightConfig

#: one scale for all tokens, also where random weights lose much by it
STATIC = Int8StaticActivationInt8WeightConfig(max_error_ratio=100.0)

#: one of each family of formats
FORMATS = (
    "int8_dynamic_activation_int8_weight", "intx_weight_only/3bit", "nf4_weight_only", "codebook_weight_only",
    "float8_dynamic_activation_float8_weight", "fp6_llm_weight_only", "mx_weight_only", "nvfp4_weight_only",
    "gguf_weight_only", "int8_dynamic_activation_int8_semi_sparse_weight",
)  # fmt: skip


def load(dense, sd3, config=None, **options):
    if config is not None:
        options["quantization_config"] = (
            config if isinstance(config, AoConfig) else AoConfig(config)
        )
    return type(sd3.make()).from_pretrained(dense, **options)


@pytest.mark.parametrize("config", FORMATS)
def test_every_family(dense, sd3, run, tmp_path, config):
    made = load(dense, sd3, config)
    expected = run(made)
    assert 4 < float(sqnr(run(load(dense, sd3)), expected)) < 50
    made.save_pretrained(tmp_path / "q", max_shard_size="40KB")
    assert torch.equal(run(load(tmp_path / "q", sd3)), expected)


def test_one_format(dense, sd3, run, tmp_path):
    made = load(dense, sd3, "int4_weight_only")
    made.save_pretrained(tmp_path / "q", max_shard_size="40KB")
    assert not any(file.problem for file in verify_checkpoint(tmp_path / "q"))
    found = open_checkpoint(tmp_path / "q")
    assert len(found.records) == len(made.hf_quantizer.report.with_status("changed"))
    load_model(other := sd3.make(), tmp_path / "q")
    assert torch.equal(run(other.eval()), run(made))
    # what save_model wrote has the weights, and no configuration that says so
    save_model(made, tmp_path / "plain")
    load_model(other := sd3.make(), tmp_path / "plain")
    assert torch.equal(run(other.eval()), run(made))


def test_part_by_part(dense, sd3, run, tmp_path):
    config = FqnToConfig(
        {"re:.*attn.*": "int8_weight_only", "norm_out.linear": None, "*": "nf4_weight_only"}
    )
    made = load(dense, sd3, AoConfig(config, modules_to_not_convert=["transformer_blocks.1.ff"]))
    kept = {r.fqn: r.reason for r in made.hf_quantizer.report.with_status("unchanged")}
    assert "modules_to_not_convert" in kept["transformer_blocks.1.ff.net.2.weight"]
    assert made.transformer_blocks[0].attn.to_q.weight.spec.dtype == "int8"
    assert made.transformer_blocks[0].ff.net[2].weight.spec.dtype == "nf4"
    assert not isinstance(made.norm_out.linear.weight, QTensor)
    made.save_pretrained(tmp_path / "q")
    loaded = load(tmp_path / "q", sd3)
    for name, tensor in made.state_dict().items():
        assert torch.equal(*(plain(t) for t in (tensor, loaded.state_dict()[name]))), name
    # torch's own matmul of a dense weight rounds by where the file has it in memory
    torch.testing.assert_close(run(loaded), run(made), rtol=1e-5, atol=1e-6)


def plain(tensor):
    return tensor.dequantize() if isinstance(tensor, QTensor) else tensor


def test_convolutions_that_stay_dense_are_reported(named, tmp_path):
    vae = named["AutoencoderKL"]
    vae.make().save_pretrained(tmp_path / "dense")
    made = load(tmp_path / "dense", vae, "int8_dynamic_activation_int8_weight")
    convolutions = [n for n, m in made.named_modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) > 10
    records = {record.fqn: record for record in made.hf_quantizer.report.records}
    for name in convolutions:
        record = records[f"{name}.weight"]
        assert record.status == "skipped"
        assert "convolution" in record.reason
    assert made.hf_quantizer.report.with_status("changed")


def test_dtypes(dense, sd3, run, tmp_path):
    made = load(dense, sd3, "int4_weight_only", torch_dtype=torch.bfloat16)
    assert made.proj_out.weight.dtype == made.dtype == torch.bfloat16
    other = load(dense, sd3, torch_dtype=torch.bfloat16)
    quantize_(other, "int4_weight_only")
    assert torch.equal(made.proj_out.weight.qdata, other.proj_out.weight.qdata)
    made.save_pretrained(tmp_path / "q")
    wide = load(tmp_path / "q", sd3)  # diffusers' default
    assert wide.proj_out.weight.dtype == torch.float32
    assert torch.equal(wide.proj_out.weight.qdata, made.proj_out.weight.qdata)


def test_calibrated_and_in_turn(dense, sd3, run, tmp_path):
    model = load(dense, sd3)
    data = [sd3.inputs()]
    quantize_(model.transformer_blocks[0], "int4_weight_only")  # a module is no model of diffusers
    assert not hasattr(model, "hf_quantizer")
    quantize_(model, STATIC, data=data)
    assert model.config["quantization_config"].quant_method.value == "ao"
    model.save_pretrained(tmp_path / "q")
    again = load(tmp_path / "q", sd3)
    assert torch.equal(run(again), run(model))
    model.save_pretrained(tmp_path / "q")  # saving changes nothing of the configuration
    quantize_(again, FqnToConfig({"proj_out": None, "*": "int8_weight_only"}))


def test_two_configurations_are_both_named(dense, sd3):
    model = load(dense, sd3, AoConfig(FqnToConfig({"proj_out": "int8_weight_only"})))
    quantize_(model, "int4_weight_only")
    entry = model.config["quantization_config"].to_dict()
    names = [step["name"] for step in entry["config"]["sequence"]]
    assert names == ["fqn_to_config", "int4_weight_only"]


def test_dequantized_it_is_an_ordinary_model(dense, sd3, run, tmp_path):
    model = load(dense, sd3, "int8_weight_only")
    expected = run(model)
    small = model.get_memory_footprint()
    twin = copy.deepcopy(model)
    plain = model.dequantize()
    assert "quantization_config" not in plain.config
    torch.testing.assert_close(run(plain), expected, rtol=1e-4, atol=1e-5)
    assert plain.get_memory_footprint() == load(dense, sd3).get_memory_footprint()
    assert twin.get_memory_footprint() == small == memory_footprint(twin)
    plain.save_pretrained(tmp_path / "plain")
    assert torch.equal(run(load(tmp_path / "plain", sd3)), run(plain))


def test_attached_by_hand(dense, sd3):
    model = load(dense, sd3, "int8_weight_only")
    del model.hf_quantizer
    attach(model, AoConfig("int8_weight_only"))
    assert "int8" in str(model.proj_out)


@pytest.mark.parametrize("place", ["cpu", "auto", {"": "cpu"}], ids=["cpu", "auto", "map"])
def test_device_map(dense, sd3, run, tmp_path, place):
    first = load(dense, sd3, "int8_weight_only", device_map=place)
    first.save_pretrained(tmp_path / "q")
    assert torch.equal(run(load(tmp_path / "q", sd3, device_map=place)), run(first))


def test_devices_are_planned_by_what_is_stored(dense, sd3):
    """More memory than the quantized model takes, and less than the dense one."""
    small, large = (
        load(dense, sd3, config).get_memory_footprint() for config in ("int4_weight_only", None)
    )
    room = {"cpu": (small + large) // 2}
    made = load(dense, sd3, "int4_weight_only", device_map="auto", max_memory=room)
    assert not any(parameter.is_meta for parameter in made.parameters())
    sizes = {"four": 0.53, "eight": 1.02, "dense": 4.0}
    counted, excess = counted_as(sizes)
    assert list(map(str, counted.values())) == ["CustomDtype.INT4", "torch.int8", "torch.float32"]
    assert excess == pytest.approx(1.06)


def test_groups_of_layers_are_offloaded(dense, sd3, run):
    """To the same device, since this one may have no other: parameters are moved and swapped all the same."""
    model = load(dense, sd3, "int8_weight_only")
    expected = run(model)
    model.enable_group_offload(
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
    )
    assert torch.equal(run(model), expected)
    assert isinstance(model.proj_out.weight, QTensor)


def test_old_names_of_attention(tmp_path, named, trials):
    """Files from before diffusers renamed the weights of attention, quantized without its code."""
    from safetensors.torch import load_file, save_file

    from ao_quant import quantize_checkpoint

    vae = named["AutoencoderKL"]
    model = vae.make()
    model.save_pretrained(tmp_path / "new")
    file = tmp_path / "new" / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(file)
    for name in [name for name in tensors if ".attentions." in name]:
        for now, before in old.items():
            if f".{now}." in name:
                tensors[name.replace(f".{now}.", f".{before}.")] = tensors.pop(name)
    save_file(tensors, file)
    quantize_checkpoint(tmp_path / "new", tmp_path / "q", "int8_weight_only")
    made = load(tmp_path / "q", vae)
    assert isinstance(made.decoder.mid_block.attentions[0].to_q.weight, QTensor)
    quantize_(model.eval(), "int8_weight_only")
    assert torch.equal(trials.outputs(made, vae.inputs()), trials.outputs(model, vae.inputs()))


def test_exported(dense, sd3, run):
    model = load(dense, sd3, "int8_weight_only")
    program = torch.export.export(model, (), {**sd3.inputs(), "return_dict": False}).module()
    found = program(**sd3.inputs(), return_dict=False)[0]
    assert float(sqnr(run(model), found)) > 80
