"""An embedding that the publisher's `config.json` ties to the head is one, as it is for `quantize_`."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from ao_core import (
    FqnToConfig,
    WeightOnlyConfig,
    load_model,
    open_checkpoint,
    quantize_,
    quantize_checkpoint,
)

INT4 = WeightOnlyConfig("int4", 32, "bfloat16")
CONFIG = {"architectures": ["SmallForCausalLM"], "tie_word_embeddings": True, "vocab_size": 50}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict(
            {"embed_tokens": nn.Embedding(50, 64), "up_proj": nn.Linear(64, 96)}
        )
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight


@pytest.fixture
def folder(published):
    """`folder(config)`: a tied model as others publish it, without its head."""

    def write(config, **more):
        torch.manual_seed(0)
        state = {n: t for n, t in Model().state_dict().items() if not n.startswith("lm_head")}
        path = published([{**state, **more}])
        if config is not None:
            (path / "config.json").write_text(
                config if isinstance(config, str) else json.dumps(config)
            )
        return path

    return write


def spec_of(target):
    return open_checkpoint(target).entries["model.embed_tokens.weight"].spec


@pytest.mark.parametrize(
    "config",
    [CONFIG, {**CONFIG, "tie_word_embeddings": None},
     {"architectures": ["GPT2LMHeadModel"], "vocab_size": 50},
     {"architectures": ["XForConditionalGeneration"], "text_config": {"vocab_size": 50}}],
)  # fmt: skip
def test_it_is_what_quantize_makes_of_the_model(folder, tmp_path, config):
    quantize_checkpoint(folder(config), tmp_path / "out", INT4)
    torch.manual_seed(0)
    expected = Model()
    quantize_(expected, INT4)
    assert expected.lm_head.weight.spec.dtype == "int8"  # a head keeps 8 bits
    loaded = Model()
    load_model(loaded, tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model["embed_tokens"].weight
    assert spec_of(tmp_path / "out") == expected.lm_head.weight.canonical().spec
    x = torch.ones(2, 64)
    assert torch.equal(loaded.lm_head(x), expected.lm_head(x))


@pytest.mark.parametrize(
    "config",
    [None, "{", "[]", {}, {**CONFIG, "tie_word_embeddings": False}, {**CONFIG, "vocab_size": 51},
     {**CONFIG, "architectures": ["SmallModel"]}, {**CONFIG, "architectures": 3},
     {**CONFIG, "text_config": {"tie_word_embeddings": False}}],
    ids=str,
)  # fmt: skip
def test_it_is_kept_where_nothing_says_so(folder, tmp_path, config):
    quantize_checkpoint(folder(config), tmp_path / "out", INT4)
    assert spec_of(tmp_path / "out") is None


def test_a_head_of_its_own(folder, tmp_path):
    source = folder(CONFIG, **{"output.weight": torch.randn(50, 64)})
    quantize_checkpoint(source, tmp_path / "out", INT4)
    assert spec_of(tmp_path / "out") is None


def test_names_and_patterns_decide_as_ever(folder, tmp_path):
    source = folder(CONFIG)
    quantize_checkpoint(source, tmp_path / "named", FqnToConfig({"lm_head.weight": INT4}))
    assert spec_of(tmp_path / "named").dtype == "int4"
    quantize_checkpoint(source, tmp_path / "excluded", INT4, exclude=["lm_head"])
    assert spec_of(tmp_path / "excluded") is None
