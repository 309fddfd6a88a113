"""Folders that are calibrated block by block: the bytes of memory, and whatever kills the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calibrated_in_memory import batches, in_memory
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from ao_core import FqnToConfig, Report, open_checkpoint, plan_checkpoint, quantize_, save_model
from ao_core.cli.app import make_app
from ao_core.ext import ConfigError
from ao_core.ext.calibration import HESSIAN, visit
from ao_core.ext.quantizing import decide
from ao_quant import (
    AutoRoundConfig,
    BiasCorrectionConfig,
    GPTQConfig,
    Int4WeightOnlyConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    QronosConfig,
    quantize_checkpoint,
)

GPTQ = GPTQConfig(Int4WeightOnlyConfig(32))


@pytest.fixture
def folder(tmp_path, llama) -> Path:
    """Three blocks in bfloat16, in two files."""
    model = llama(num_hidden_layers=3, tie_word_embeddings=False).bfloat16()
    model.save_pretrained(tmp_path / "src", max_shard_size="100KB")
    return tmp_path / "src"


@pytest.mark.parametrize(
    "config",
    [
        GPTQ,
        FqnToConfig(
            {
                "lm_head": GPTQ,
                r"re:.*down_proj": Int8WeightOnlyConfig(),
                r"re:.*q_proj": None,
                "*": GPTQ,
            }
        ),
        Int8StaticActivationInt8WeightConfig(),
        AutoRoundConfig(Int4WeightOnlyConfig(32), iterations=6, bfloat16=False),
        QronosConfig(Int4WeightOnlyConfig(32)),
    ],
    ids=["gptq", "mixed", "static", "autoround", "qronos"],
)
@pytest.mark.filterwarnings("ignore:the inputs of")
def test_the_bytes_are_those_of_quantizing_in_memory(folder, tmp_path, config) -> None:
    _, expected = in_memory(folder, config, tmp_path / "memory")
    report = quantize_checkpoint(folder, tmp_path / "files", config, data=batches())
    made = tmp_path / "files" / "model.safetensors"
    assert made.read_bytes() == (tmp_path / "memory" / "model.safetensors").read_bytes()
    assert report.calibration == "blocks (model.layers: 3 blocks, called once each in order)"
    fields = ("status", "rows", "damping", "error_vs_rtn", "note", "sqnr_db", "loss_after")
    of_files = {record.fqn: record for record in report}
    for record in expected:
        found = of_files[record.fqn]
        assert [getattr(found, f) for f in fields] == [getattr(record, f) for f in fields]
    assert any(record.rows == 144 for record in report)


def test_a_tied_head_is_that_of_memory(tmp_path, llama) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "src")
    in_memory(tmp_path / "src", GPTQ, tmp_path / "memory")
    quantize_checkpoint(tmp_path / "src", tmp_path / "files", GPTQ, data=batches())
    made, expected = (open_checkpoint(tmp_path / name) for name in ("files", "memory"))
    assert set(expected.ties) == {"model.embed_tokens.weight"} or set(expected.ties) == {
        "lm_head.weight"
    }
    assert len(made.slots) == len(expected.slots)
    for name in set(made.slots) & set(expected.slots):
        assert torch.equal(made.read(name), expected.read(name)), name
    assert {spec.dtype for e in made.entries.values() if (spec := e.spec)} == {"uint4", "int8"}


def test_biases_are_corrected_as_in_memory(tmp_path, llama, monkeypatch) -> None:
    """Also where an interruption leaves a weight written and its bias not, or the other way round."""
    from ao_core.checkpoints import calibrated, pieces

    config = BiasCorrectionConfig(GPTQConfig(Int4WeightOnlyConfig(32)))
    sizes = {"num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True}
    llama(**sizes, tie_word_embeddings=False).bfloat16().save_pretrained(tmp_path / "src")
    _, expected = in_memory(tmp_path / "src", config, tmp_path / "memory")
    monkeypatch.setattr(pieces, "SIZE", 3_000)
    write, left = calibrated.write_piece, [0]

    def stopping(*args) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(calibrated, "write_piece", stopping)
        for count in (2, 5, 1):
            left[0] = count
            with pytest.raises(KeyboardInterrupt):
                quantize_checkpoint(tmp_path / "src", tmp_path / "files", config, data=batches())
    report = quantize_checkpoint(tmp_path / "src", tmp_path / "files", config, data=batches())
    made, wanted = (tmp_path / each / "model.safetensors" for each in ("files", "memory"))
    assert made.read_bytes() == wanted.read_bytes()
    of_files = {r.fqn: (r.status, r.reason, r.rows, r.bytes_after) for r in report}
    corrected = [r for r in expected if r.fqn.endswith("bias")]
    assert len(corrected) == 3 * 7
    for r in corrected:
        assert of_files[r.fqn] == ("changed", r.reason, r.rows, r.bytes_after)


def test_one_block_is_in_memory_at_a_time(folder, tmp_path, monkeypatch) -> None:
    from ao_core.checkpoints import paging

    loaded: list[set[str]] = []
    real = paging._set

    def noted(entry, value) -> None:
        real(entry, value)
        held = {name for name, p in model[0].named_parameters() if not p.is_meta}
        loaded.append({name.split(".")[2] for name in held if ".layers." in name})

    model = []
    init = paging.Paged.__post_init__

    def began(self) -> None:
        model.append(self.calibration.model)
        init(self)

    monkeypatch.setattr(paging, "_set", noted)
    monkeypatch.setattr(paging.Paged, "__post_init__", began)
    quantize_checkpoint(folder, tmp_path / "files", GPTQ, data=batches())
    assert max(map(len, loaded)) == 1
    assert set().union(*loaded) == {"0", "1", "2"}
    plan = plan_checkpoint(folder, GPTQ, data=batches())
    # what blocks return, and what their layers do: queries, keys, values, and the rest
    activations = 144 * 2 * (48 + (48 + 2 * 24 + 48 + 2 * 80 + 48))
    assert plan.peak_memory == 2 * 18_528 * 2 + 4 * 8 * 80**2 + activations + 256 * 10**6
    assert "two blocks" in plan.memory
    assert plan.report.bytes_after < plan.report.bytes_before


def test_an_interruption_loses_no_block_that_is_done(folder, tmp_path, monkeypatch) -> None:
    from ao_core.checkpoints import calibrated

    solve, solved, left = calibrated.solve, [0], [10**9]

    def counted(*args) -> None:
        if solved[0] == left[0]:
            raise KeyboardInterrupt
        solved[0] += 1
        solve(*args)

    def run(name: str, stop: int = 10**9) -> int:
        solved[0], left[0] = 0, stop
        quantize_checkpoint(folder, tmp_path / name, GPTQ, data=batches())
        return solved[0]

    def made(name: str) -> bytes:
        return (tmp_path / name / "model.safetensors").read_bytes()

    monkeypatch.setattr(calibrated, "solve", counted)
    assert run("whole") == 21
    for stop, again in ((9, 14), (20, 7)):
        with pytest.raises(KeyboardInterrupt):
            run(f"stopped-{stop}", stop)
        assert run(f"stopped-{stop}") == again
        assert made(f"stopped-{stop}") == made("whole")


def test_other_data_do_not_finish_a_run(folder, tmp_path, monkeypatch) -> None:
    from ao_core.checkpoints import calibrated

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrated, "solve", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(folder, tmp_path / "files", GPTQ, data=batches())
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="an unfinished run with another data"):
        quantize_checkpoint(folder, tmp_path / "files", GPTQ, data=batches(2))


def test_what_cannot_be_calibrated_from_files(folder, tmp_path, monkeypatch) -> None:
    def refused(config=GPTQ, data=None, source=folder) -> str:
        with pytest.raises(ConfigError) as caught:
            quantize_checkpoint(source, tmp_path / "out", config, data=data)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert "needs calibration data" in refused()
    assert "quantize_checkpoint(src, dst, config, data=batches)" in refused()
    assert "needs no calibration data" in refused(Int8WeightOnlyConfig(), batches())
    assert "a single dict" in refused(data=batches()[0])
    # a cache cannot be run again
    cached = [{"input_ids": batch["input_ids"]} for batch in batches()]
    assert "use_cache=False" in refused(data=cached)
    static = Int8StaticActivationInt8WeightConfig()
    mixed = FqnToConfig({r"re:.*down_proj": static, "*": GPTQ})
    assert "see different inputs" in refused(mixed, batches())
    plain = tmp_path / "plain"
    save_file({"layer.weight": torch.randn(8, 8)}, _made(plain) / "model.safetensors")
    assert "the model must be run, and it is not known" in refused(data=batches(), source=plain)
    for file in folder.glob("*.safetensors"):  # a weight that the files lack
        kept = {n: t for n, t in load_file(file).items() if "layers.1.mlp.up" not in n}
        save_file(kept, file, {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        n: f for n, f in index["weight_map"].items() if "layers.1.mlp.up" not in n
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "the files do not have model.layers.1.mlp.up_proj.weight" in refused(data=batches())


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_hessians_are_shared_by_weights_of_the_same_input(llama) -> None:
    calls: list[int] = []

    def counted(function):
        def call(*args):
            calls.append(1)
            return function(*args)

        return call

    hessian = replace(HESSIAN, of=counted(HESSIAN.of), into=counted(HESSIAN.into))
    model = llama(num_hidden_layers=3)
    entries = [d for d in decide(model, GPTQ, None) if d.config == GPTQ]
    assert len(entries) == 3 * 7
    found = visit(model, batches(), entries, lambda entry: (hessian,), lambda entry, inputs: None)
    assert found.driver == "blocks"
    # q, k and v; o; gate and up; down: once for each batch
    assert len(calls) == 3 * 4 * 3


def test_a_cache_that_was_left_on_costs_time_and_changes_nothing(folder, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").train()
    cached = [{"input_ids": batch["input_ids"]} for batch in batches()]
    report = quantize_(model, GPTQ, data=cached)
    assert report.calibration.startswith("prefix (")
    assert "use_cache=False" in report.calibration
    assert model.training
    save_model(model, tmp_path / "cached")
    in_memory(folder, GPTQ, tmp_path / "memory")
    one, other = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("cached", "memory"))
    assert one == other


@pytest.fixture
def with_tokenizer(folder) -> Path:
    letters = {chr(32 + number): number for number in range(96)}
    made = Tokenizer(models.WordLevel(letters, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    template = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }} {% endfor %}"
    fast = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)
    fast.save_pretrained(folder)
    return folder


def test_texts_and_lines_of_json_are_data(with_tokenizer, tmp_path) -> None:
    text = "".join(f"{number} bottles of beer on the wall. " for number in range(60))
    (tmp_path / "text.txt").write_text(text)
    lines = [
        {"text": text[:700]},
        {
            "messages": [
                {"role": "user", "content": "Hello!"},
                {"role": "assistant", "content": text},
            ]
        },
        {"input_ids": list(range(90)) * 3},
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")

    def ao(name: str, target: str, *more: str):
        arguments = ["quantize", with_tokenizer, tmp_path / target, "--config", "gptq"]
        options = ["--set", "order=groups", "--data", tmp_path / name, "--window", "64", *more]
        return CliRunner().invoke(make_app(), [*map(str, arguments), *map(str, options)])

    def said(name: str, *more: str) -> str:
        done = ao(name, "c", *more)
        assert done.exit_code == 2
        return " ".join(done.output.split())

    first = ao("text.txt", "a", "--tokens", "256")
    assert first.exit_code == 0, first.output
    assert "256 rows" in first.stderr
    report = Report.from_json((tmp_path / "a" / "ao_report.json").read_text())
    assert {r.rows for r in report.with_status("changed")} - {None} == {256}
    reads = open_checkpoint(tmp_path / "a").entries["model.layers.0.mlp.up_proj.weight"].spec
    assert reads is not None
    assert reads.dtype == "uint4"
    assert LlamaForCausalLM.from_pretrained(tmp_path / "a") is not None
    assert ao("text.txt", "seed", "--tokens", "256", "--seed", "7").exit_code == 0
    one, other = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("a", "seed"))
    assert one != other
    assert ao("lines.jsonl", "b").exit_code == 0
    rows = Report.from_json((tmp_path / "b" / "ao_report.json").read_text()).with_status("changed")
    assert all(record.rows % 64 == 0 for record in rows if record.rows)
    assert "64 tokens are fewer than the 80 columns" in said("text.txt", "--tokens", "64")
    assert "give a longer text" in said("text.txt", "--tokens", "64000")
    (tmp_path / "lines.jsonl").write_text('{"words": 3}')
    assert "line 1: need an object with one of" in said("lines.jsonl")
    (with_tokenizer / "tokenizer.json").unlink()
    (with_tokenizer / "tokenizer_config.json").unlink()
    assert "its tokenizer cannot be loaded" in said("text.txt")
    assert not (tmp_path / "c").exists()
