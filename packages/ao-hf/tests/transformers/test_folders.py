"""Models that transformers does not know, or knows by code next to the weights; folders that lack a file."""

import json
import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    dynamic_module_utils,
)

from ao_core import QTensor, plan_checkpoint
from ao_hf import AoConfig, folders
from ao_quant import quantize_checkpoint

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class TinyConfig(LlamaConfig):
    model_type = "tiny"

class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


@pytest.fixture
def with_code(dense, tmp_path, monkeypatch):
    """A folder whose model is defined by a file in it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (dense / "modeling_tiny.py").write_text(CODE)
    auto = {name: f"modeling_tiny.{own}" for name, own in [
        ("AutoConfig", "TinyConfig"), ("AutoModelForCausalLM", "TinyForCausalLM")
    ]}  # fmt: skip
    change(dense, model_type="tiny", architectures=["TinyForCausalLM"], auto_map=auto)
    yield dense
    for name in [n for n in sys.modules if n.startswith("transformers_modules")]:
        del sys.modules[name]


def change(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def modules(folder):
    return plan_checkpoint(folder, "int8_weight_only").modules


def test_modules_are_those_of_the_model(dense):
    assert modules(dense).startswith("those of LlamaForCausalLM of transformers 5.")


def test_code_beside_the_weights_is_run_by_transformers_only(with_code, tmp_path, tokens):
    load = AutoModelForCausalLM.from_pretrained
    made = load(with_code, trust_remote_code=True, quantization_config=AoConfig("int8_weight_only"))
    assert type(made).__name__ == "TinyForCausalLM"
    assert isinstance(made.lm_head.weight, QTensor)
    made.save_pretrained(tmp_path / "q")
    (tmp_path / "q" / "modeling_tiny.py").write_text(CODE)  # a model saves it once it is registered
    change(tmp_path / "q", auto_map=json.loads((with_code / "config.json").read_text())["auto_map"])
    logits = made(tokens).logits
    assert torch.equal(load(tmp_path / "q", trust_remote_code=True)(tokens).logits, logits)

    (with_code / "modeling_tiny.py").write_text("raise SystemExit")
    assert "no model class 'TinyForCausalLM'" in modules(with_code)
    quantize_checkpoint(with_code, tmp_path / "files", "int8_weight_only")
    (tmp_path / "files" / "modeling_tiny.py").write_text(CODE)
    assert torch.equal(load(tmp_path / "files", trust_remote_code=True)(tokens).logits, logits)


def test_a_class_that_was_registered(dense, tmp_path, tokens):
    AutoConfig.register("own", OwnConfig, exist_ok=True)
    AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM, exist_ok=True)
    change(dense, model_type="own", architectures=["OwnForCausalLM"])
    made = AutoModelForCausalLM.from_pretrained(
        dense, quantization_config=AoConfig("int4_weight_only")
    )
    made.save_pretrained(tmp_path / "q")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    assert type(again) is OwnForCausalLM
    assert torch.equal(again(tokens).logits, made(tokens).logits)


def test_a_class_that_nobody_knows(dense, tmp_path):
    change(dense, model_type="nobodys", architectures=["NobodysModel"])
    with pytest.raises(ValueError, match="nobodys"):
        AutoModelForCausalLM.from_pretrained(
            dense, quantization_config=AoConfig("int8_weight_only")
        )
    assert "guessed from the names of tensors: transformers 5." in modules(dense)
    report = quantize_checkpoint(dense, tmp_path / "q", "int8_weight_only")
    assert len(report.with_status("changed")) == 15


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": None}, "config.json names no class in 'architectures'"),
        ({"architectures": ["AutoModel"]}, "has no model class 'AutoModel'"),
        ({"num_attention_heads": "four"}, "LlamaForCausalLM cannot be made from config.json"),
    ],
    ids=["no class", "no model", "no number"],
)
def test_configurations_that_say_no_model(dense, changes, reason):
    change(dense, **changes)
    assert modules(dense).startswith("guessed from the names of tensors: ")
    assert reason in modules(dense)


def test_without_transformers_names_decide(dense, monkeypatch):
    monkeypatch.setattr(folders, "find_spec", lambda name: None)
    assert modules(dense).endswith("transformers, which knows the model, is not installed")


def test_a_folder_without_a_tokenizer_quantizes_and_says_so_where_one_is_asked_for(dense, tmp_path):
    quantize_checkpoint(dense, tmp_path / "q", "int8_weight_only")
    AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    with pytest.raises((OSError, ValueError), match="tokenizer"):
        AutoTokenizer.from_pretrained(tmp_path / "q")
