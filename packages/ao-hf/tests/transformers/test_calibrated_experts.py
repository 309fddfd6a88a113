"""Folders whose experts transformers joins on loading, calibrated from files: what memory makes, in parts."""

from __future__ import annotations

import pytest
import torch
import transformers
from calibrated_in_memory import batches
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ao_core import QTensor, open_checkpoint, plan_checkpoint, quantize_
from ao_hf.transformers.folders import folder_model
from ao_quant import (
    AWQConfig,
    Float8WeightOnlyConfig,
    GPTQConfig,
    Int4WeightOnlyConfig,
    NVFP4WeightOnlyConfig,
    RotateConfig,
    quantize_checkpoint,
)

GPTQ = GPTQConfig(Int4WeightOnlyConfig(32))
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(params=["mixtral", "qwen3"])
def folder(tmp_path, request):
    """A small model of experts in bfloat16, in several files."""
    if request.param == "mixtral":
        config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        model = MixtralForCausalLM(config)
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))
    model.bfloat16().save_pretrained(tmp_path / "src", max_shard_size="100KB")
    return tmp_path / "src"


def codes(model) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{part}": leaf
        for name, parameter in model.named_parameters()
        if isinstance(parameter, QTensor)
        for part, leaf in parameter.canonical().parts.items()
    }


@pytest.mark.parametrize(
    "config",
    [
        GPTQ,
        GPTQConfig(NVFP4WeightOnlyConfig()),
        AWQConfig(Int4WeightOnlyConfig(32), steps=4),
        [RotateConfig(), GPTQ],
    ],
    ids=["gptq", "nvfp4", "awq", "rotate, gptq"],
)
def test_it_is_what_quantizing_in_memory_makes(folder, tmp_path, config) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    in_memory = quantize_(expected, config, data=batches())
    report = quantize_checkpoint(folder, tmp_path / "files", config, data=batches())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "files")
    ours, theirs = codes(loaded), codes(expected)
    assert set(ours) == set(theirs)
    assert any("experts.gate_up_proj" in name for name in ours)
    for name, leaf in theirs.items():
        assert torch.equal(ours[name], leaf) if isinstance(leaf, torch.Tensor) else True, name
    with torch.no_grad():
        one, other = (each(batches()[0]["input_ids"]).logits for each in (expected, loaded))
    assert torch.equal(one, other)
    # a line for each tensor of the files, with what is known of its parameter
    of_files = [r for r in report if ".experts." in r.fqn and r.status == "changed"]
    of_memory = {r.fqn: r for r in in_memory if "experts" in r.fqn}
    assert len(of_files) == 2 * 4 * 3
    assert sum(r.bytes_before for r in of_files) == sum(r.bytes_before for r in of_memory.values())
    assert sum(r.bytes_after for r in of_files) <= 1.01 * sum(
        r.bytes_after for r in of_memory.values()
    )
    assert {(r.rows, r.damping, r.error_vs_rtn) for r in of_files} == {
        (r.rows, r.damping, r.error_vs_rtn) for r in of_memory.values()
    }


def test_a_part_that_is_written_before_the_others(folder, tmp_path, monkeypatch) -> None:
    """An interruption between two pieces of one parameter ends with the same bytes."""
    from ao_core.checkpoints import calibrated, pieces

    quantize_checkpoint(folder, tmp_path / "peace", GPTQ, data=batches(), max_shard_size="20KB")
    monkeypatch.setattr(pieces, "SIZE", 30_000)
    write, left = calibrated.write_piece, [1]

    def stopping(*args):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(*args)

    monkeypatch.setattr(calibrated, "write_piece", stopping)
    for count in (4, 3, 1):
        left[0] = count
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(
                folder, tmp_path / "stopped", GPTQ, data=batches(), max_shard_size="20KB"
            )
    left[0] = 10**9
    quantize_checkpoint(folder, tmp_path / "stopped", GPTQ, data=batches(), max_shard_size="20KB")
    files = sorted(path.name for path in (tmp_path / "peace").glob("*.safetensors"))
    assert len(files) > 5
    for name in files:
        made, expected = ((tmp_path / each / name).read_bytes() for each in ("stopped", "peace"))
        assert made == expected, name


def test_blocks_that_cross_the_tensors_of_the_files(folder, tmp_path) -> None:
    """They stay dense, and the report says why: joined on loading, they could not be one tensor."""
    crossing = Float8WeightOnlyConfig(granularity="block")
    for config, data in ((crossing, None), (GPTQConfig(crossing), batches())):
        target = tmp_path / type(config).__name__
        plan = plan_checkpoint(folder, config, data=data)
        report = quantize_checkpoint(folder, target, config, data=data)
        for each in (plan.report, report):
            kept = [
                r
                for r in each
                if ".experts." in r.fqn and "whose blocks cross its border" in r.reason
            ]
            assert len(kept) == 2 * 4 * 2, kept  # the halves of gate_up_proj, not down_proj
            assert {r.status for r in kept} == {"skipped"}
        loaded = AutoModelForCausalLM.from_pretrained(target)
        experts = loaded.model.layers[0].mlp.experts
        assert isinstance(experts.down_proj, QTensor)
        assert not isinstance(experts.gate_up_proj, QTensor)


@pytest.mark.parametrize("name", ["DeepseekV3", "Ernie4_5_Moe", "Jamba", "Olmoe"])
def test_places_in_other_families(tmp_path, name) -> None:
    """Each tensor of the files has the values of the parameter at its place."""
    kind = getattr(transformers, f"{name}Config")
    more = {
        **dict.fromkeys(("num_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    own = {each: value for each, value in {**SIZES, **more}.items() if hasattr(kind(), each)}
    model = getattr(transformers, f"{name}ForCausalLM")(kind(**own, pad_token_id=0))
    model.save_pretrained(tmp_path)
    files, parameters = open_checkpoint(tmp_path), dict(model.named_parameters())
    known = folder_model(tmp_path, type(model).__name__, list(files.entries))
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for file, parameter in known.names.items():
        parts.setdefault(parameter, {})[file] = files.entries[file].shape
    joined = {parameter: shapes for parameter, shapes in parts.items() if len(shapes) > 1}
    assert {p.rpartition(".")[2] for p in joined} == {"gate_up_proj", "down_proj"}
    for parameter, shapes in joined.items():
        places = known.places(parameter, shapes)
        assert places.keys() == shapes.keys()
        for file, place in places.items():
            assert torch.equal(parameters[parameter][place], files.read(file)), file


def test_the_same_tensors_are_there(folder, tmp_path) -> None:
    quantize_checkpoint(folder, tmp_path / "files", GPTQ, data=batches())
    made, source = (open_checkpoint(each) for each in (tmp_path / "files", folder))
    assert set(made.entries) == set(source.entries)
    assert sum("experts" in name for name in made.records) == 2 * 4 * 3
