"""Folders: what is written, what is kept, what a kill leaves, and what commands say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ao_core import load_model
from ao_core.ext import CheckpointError, ConfigError, UnknownNameError
from ao_quant.interchange import convert_checkpoint, load_foreign
from ao_quant.interchange import journal as journals
from ao_quant.interchange.gptq import GPTQ_V2


@pytest.fixture
def gptq(folder, integers) -> Path:
    """A folder of GPTQ with two weights, a dense one, a bias and a tensor that nobody knows."""
    tensors = {"norm.weight": torch.rand(64).half()}
    for name in ("a", "b"):
        tensor = integers(4, name == "a", shape=(64, 64))
        tensors |= GPTQ_V2.write(f"{name}.weight", tensor, {}).tensors
    tensors |= {"a.bias": torch.rand(64).half(), "a.k_scale": torch.rand(1)}
    label = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": 4,
        "group_size": 32,
        "odd": 1,
    }
    return folder(tensors, label)


def files(place: Path) -> dict[str, bytes]:
    return {str(f.relative_to(place)): f.read_bytes() for f in place.rglob("*") if f.is_file()}


def test_a_folder_goes_there_and_back_with_its_bytes(gptq, tmp_path) -> None:
    before = files(gptq)
    there = convert_checkpoint(gptq, tmp_path / "ao", "ao")
    back = convert_checkpoint(tmp_path / "ao", tmp_path / "back", "gptq_v2")
    assert files(gptq) == before
    assert (there.verdict, back.verdict, there.exit_code) == ("bytes equal", "bytes equal", 0)
    assert there.unknown == ("a.k_scale",)
    one, other = (load_file(place / "model.safetensors") for place in (gptq, tmp_path / "back"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["kept"] == [1]
    assert config["quantization_config"]["checkpoint_format"] == "gptq_v2"
    assert (tmp_path / "back/tokenizer.json").read_text() == "{}"
    told = json.loads((tmp_path / "ao/ao_interchange.json").read_text())
    assert told["label"]["odd"] == 1
    assert len(told["weights"]) == 2
    assert "a.weight: bytes equal" in str(there)
    assert "k_scale" in str(there)


def test_nothing_is_written_by_a_dry_run(gptq, tmp_path) -> None:
    before = set(tmp_path.rglob("*"))
    result = convert_checkpoint(gptq, None, "bitsandbytes")
    assert result.verdict == "re-gridded"
    assert result.exit_code == 3
    assert all(v.sqnr is not None and v.sqnr > 15 for v in result.verdicts)
    assert set(tmp_path.rglob("*")) == before


def test_what_the_target_cannot_hold_stays_dense_and_is_said(gptq, tmp_path) -> None:
    result = convert_checkpoint(gptq, tmp_path / "out", "mxfp4")
    assert result.exit_code == 4
    assert all("experts" in v.reason for v in result.verdicts)
    dense = load_file(tmp_path / "out/model.safetensors")
    assert dense["a.weight"].dtype == torch.float16
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("torn", [b"", b'{"name": "torn'])
def test_a_conversion_goes_on_where_it_was_killed(at, torn, gptq, tmp_path, monkeypatch) -> None:
    class Killed(BaseException):
        pass

    count, add = [0], journals.Journal.add

    def killing(self, name, tensors, **fields):
        count[0] += 1
        if count[0] == at:
            with (self.work / "data-0").open("ab") as file:
                file.write(b"half of a tensor")
            with (self.work / "journal").open("ab") as file:
                file.write(torn)
            raise Killed
        add(self, name, tensors, **fields)

    whole = convert_checkpoint(gptq, tmp_path / "whole", "compressed-tensors")
    monkeypatch.setattr(journals.Journal, "add", killing)
    with pytest.raises(Killed):
        convert_checkpoint(gptq, tmp_path / "out", "compressed-tensors")
    with pytest.raises(ConfigError, match="something else"):
        convert_checkpoint(gptq, tmp_path / "out", "ao")
    monkeypatch.setattr(journals.Journal, "add", add)
    again = convert_checkpoint(gptq, tmp_path / "out", "compressed-tensors")
    assert again == whole
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_files_are_split_and_listed(gptq, tmp_path) -> None:
    convert_checkpoint(gptq, tmp_path / "out", "ao", max_shard_size=3000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert convert_checkpoint(tmp_path / "out", None, "gptq_v2").verdict == "bytes equal"


def test_places_that_cannot_be_written_and_names_that_nobody_has(gptq, tmp_path) -> None:
    for place in (gptq, gptq / "inside"):
        with pytest.raises(ConfigError, match="in the source"):
            convert_checkpoint(gptq, place, "ao")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        convert_checkpoint(gptq, tmp_path / "full", "ao")
    with pytest.raises(UnknownNameError, match="gptq_v2"):
        convert_checkpoint(gptq, tmp_path / "out", "gptq_v3")
    with pytest.raises(CheckpointError, match="is not hqq"):
        convert_checkpoint(gptq, tmp_path / "out", "ao", source_format="hqq")


def model() -> torch.nn.Module:
    made = torch.nn.ModuleDict(
        {
            "a": torch.nn.Linear(64, 64),
            "b": torch.nn.Linear(64, 64, bias=False),
            "norm": torch.nn.RMSNorm(64),
        }
    )
    return made.half()


def test_a_model_computes_with_what_was_read(gptq, tmp_path) -> None:
    ours, theirs = model(), model()
    assert load_foreign(ours, gptq) == ("a.k_scale",)
    x = torch.randn(3, 64).half()
    dense = ours["a"].weight.dequantize()
    assert torch.allclose(
        ours["a"](x), torch.nn.functional.linear(x, dense, ours["a"].bias), atol=2e-2
    )
    convert_checkpoint(gptq, tmp_path / "ao", "ao")
    load_model(theirs, tmp_path / "ao", strict=False)
    assert torch.equal(ours["b"](x), theirs["b"](x))


def test_a_checkpoint_that_does_not_fit_leaves_the_model_as_it_was(gptq) -> None:
    other = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64)}).half()
    before = {name: t.clone() for name, t in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="no module|missing"):
        load_foreign(other, gptq)
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())


def test_the_command_ends_with_the_code_of_the_verdict(gptq, tmp_path) -> None:
    import typer
    from typer.testing import CliRunner

    from ao_quant.interchange.command import convert

    app = typer.Typer()
    app.command()(convert)
    run = CliRunner().invoke
    assert run(app, [str(gptq), str(tmp_path / "x"), "--to", "compressed-tensors"]).exit_code == 0
    told = run(app, [str(gptq), "--to", "bitsandbytes", "--dry-run", "--json"])
    assert told.exit_code == 3
    assert json.loads(told.stdout)["verdict"] == "re-gridded"
    assert run(app, [str(gptq), "--to", "mxfp4", "--dry-run"]).exit_code == 4
