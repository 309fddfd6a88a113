"""Folders of several algorithms, and of two in turn, are made again in a new process, byte for byte."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from ao_core import FqnToConfig, config_to_json, quantize_checkpoint
from ao_core.cli.app import make_app
from ao_core.testing.warm import run_python
from ao_quant import AutoRoundConfig, GPTQConfig, Int4WeightOnlyConfig
from ao_quant.planning import plan

#: what differs of each replay, with the tensors and the data as they were and then with others
REPLAY = """
import json, sys
from ao_core import replay_checkpoint
import torch
root = sys.argv[1]
for name in ("rounding", "gptq", "plan", "autoround", "twice"):
    rows = [json.loads(line)["input_ids"] for line in open(f"{root}/data.jsonl")]
    data = [{"input_ids": torch.tensor([row]), "use_cache": False} for row in rows]
    data = data if name in ("gptq", "autoround", "twice") else None
    print(json.dumps(replay_checkpoint(f"{root}/{name}", f"{root}/src", f"{root}/again-{name}", data=data)))
"""


@pytest.mark.slow
def test_recipes_in_a_new_process(tmp_path, llama) -> None:
    source = tmp_path / "src"
    llama(num_hidden_layers=2, tie_word_embeddings=False).bfloat16().save_pretrained(source)
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    rows = [[(7 * i + j * j) % 96 for j in range(24)] for i in range(4)]
    lines = [json.dumps({"input_ids": row}) for row in rows]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    candidates = ["int8_weight_only", Int4WeightOnlyConfig(32)]
    planned = plan(model, bits=6, candidates=candidates, measure="weight")
    (tmp_path / "gptq.json").write_text(config_to_json(GPTQConfig(Int4WeightOnlyConfig(32))))
    quantize_checkpoint(source, tmp_path / "rounding", Int4WeightOnlyConfig(32))
    quantize_checkpoint(source, tmp_path / "plan", planned)
    data = ("--data", tmp_path / "data.jsonl", "--window", "24", "--tokens", "96", "--seed", "3")
    batches = [{"input_ids": torch.tensor([row]), "use_cache": False} for row in rows]
    rounds = AutoRoundConfig(Int4WeightOnlyConfig(32))
    quantize_checkpoint(source, tmp_path / "autoround", rounds, data=batches)
    head = FqnToConfig({"model.layers.0.mlp.up_proj": "int8_weight_only"})
    quantize_checkpoint(source, tmp_path / "once", head)
    gptq = GPTQConfig(Int4WeightOnlyConfig(32))
    quantize_checkpoint(tmp_path / "once", tmp_path / "twice", gptq, data=batches)
    ao = CliRunner()
    line = ["quantize", source, tmp_path / "gptq", "--config", tmp_path / "gptq.json", *data]
    result = ao.invoke(make_app(), [str(each) for each in line])
    assert result.exit_code == 0, result.output
    lock = json.loads((tmp_path / "gptq/ao.lock.json").read_text())
    assert lock["seeds"] == {"data": 3}
    assert len(lock["steps"][0]["data"]) == 64
    out = run_python("-c", REPLAY, tmp_path, check=True).stdout.splitlines()
    assert [json.loads(each) for each in out] == [["", []]] * 5
    for name in ("rounding", "gptq", "plan", "autoround", "twice"):
        files = ("model.safetensors", "config.json", "README.md")
        one, other = (
            [(tmp_path / folder / file).read_bytes() for file in files]
            for folder in (name, f"again-{name}")
        )
        assert one == other
    (tmp_path / "data.jsonl").write_text("\n".join(lines[::-1]))
    again = ["replay", tmp_path / "gptq", source, tmp_path / "other", *data[:2]]
    result = ao.invoke(make_app(), [str(each) for each in again])
    assert result.exit_code == 1, result.output
    assert "the calibration data are others" in result.stdout
    assert not (tmp_path / "other").exists()
