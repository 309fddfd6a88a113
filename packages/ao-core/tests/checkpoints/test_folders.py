"""What a library says of a folder is written beside the weights, and nothing else is touched."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ao_core import (
    FolderKind,
    FolderModel,
    FqnToConfig,
    Report,
    Spec,
    Transform,
    WeightOnlyConfig,
    open_checkpoint,
    plan_checkpoint,
    quantize_tensor,
)
from ao_core.checkpoints import quantize_checkpoint, verify_checkpoint
from ao_core.checkpoints.folders import find, hints
from ao_core.errors import CheckpointError
from ao_core.records import Skip
from ao_core.registry import registry


@pytest.fixture
def kind(monkeypatch, source):
    """A kind of folder that no other test sees."""
    brought = source
    made = FolderKind(
        "notes",
        recognizes=lambda folder: (folder / "notes.txt").exists(),
        refuses=lambda folder: "its notes say no" if (folder / "no.txt").exists() else None,
        files=lambda src, copy, report: {
            "notes.txt": (copy / "notes.txt").read_text() + report.config["name"],
            "more.txt": f"{src.name}: {len(report.records)} records",
        },
        hint=lambda folder: f"read {folder.name}",
        fetch=lambda name: None if name == "nothing" else brought,
    )
    table = registry.folder_kinds
    monkeypatch.setattr(table, "names", lambda: ["notes"])
    monkeypatch.setattr(table, "get", lambda name: made)
    return made


def test_files_change_in_the_copy_and_the_manifest_knows_it(source, tmp_path, kind):
    (source / "notes.txt").write_text("weights in ")
    quantize_checkpoint(source, tmp_path / "out", WeightOnlyConfig("int8"))
    assert (source / "notes.txt").read_text() == "weights in "
    assert (tmp_path / "out" / "notes.txt").read_text() == "weights in weight_only"
    report = Report.from_json((tmp_path / "out" / "ao_report.json").read_text())
    assert (tmp_path / "out" / "more.txt").read_text() == f"source: {len(report.records)} records"
    verified = verify_checkpoint(tmp_path / "out")
    assert not any(file.problem for file in verified)
    assert {"notes.txt", "more.txt"} <= {file.name for file in verified}
    assert hints(tmp_path / "out") == ["read out"]


def test_a_folder_may_be_refused_before_anything_is_written(source, tmp_path, kind):
    (source / "notes.txt").write_text("")
    (source / "no.txt").write_text("")
    with pytest.raises(CheckpointError, match="its notes say no"):
        quantize_checkpoint(source, tmp_path / "out", WeightOnlyConfig("int8"))
    assert not (tmp_path / "out").exists()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(2, 6, 8))


class Model(nn.Module):
    """What names do not tell: an embedding that is called like a layer, and experts in one parameter."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 8)
        self.mlp = nn.ModuleDict({"experts": Experts(), "down": nn.Linear(8, 6, bias=False)})
        self.gate = nn.Parameter(torch.empty(3, 8))


NAMES = {
    "tokens.weight": "tokens.weight",
    "mlp.experts.0.weight": "mlp.experts.up",
    "mlp.experts.1.weight": "mlp.experts.up",
    "body.down.weight": "mlp.down.weight",
    "gate.weight": "gate",
}


@pytest.fixture
def modelled(published, kind, monkeypatch):
    """A folder whose tensors have other names than the parameters of its model, which its kind knows."""
    tensors = {name: torch.randn(6, 8) for name in NAMES}
    tensors |= {"gate.weight": torch.randn(3, 8), "tokens.weight": torch.randn(5, 8)}
    tensors |= {"turned.weight": torch.randn(4, 8), "left.weight": torch.randn(4, 8)}
    folder = published([tensors])
    (folder / "notes.txt").write_text("")

    def model(folder, names):
        assert sorted(names) == sorted(tensors)
        with torch.device("meta"):
            made = Model()
        return FolderModel(made, NAMES, {"turned.weight": "it is turned"}, "Model of tests")

    object.__setattr__(kind, "model", model)
    return folder


def reasons(folder, config, **options):
    return {r.fqn: r.spec or r.reason for r in plan_checkpoint(folder, config, **options).report}


def test_a_model_that_is_known_decides_by_its_modules(modelled, tmp_path):
    plan = plan_checkpoint(modelled, WeightOnlyConfig("int8"))
    assert "modules: those of Model of tests" in str(plan)
    quantize_checkpoint(modelled, tmp_path / "out", WeightOnlyConfig("int8"))
    changed = {n for n, e in open_checkpoint(tmp_path / "out").entries.items() if e.spec}
    assert changed == {"body.down.weight", "mlp.experts.0.weight", "mlp.experts.1.weight"}
    found = reasons(modelled, WeightOnlyConfig("int8"))
    assert found["tokens.weight"].startswith("embeddings are kept")
    assert found["gate.weight"].startswith("Model.gate is not known to be a weight matrix")
    assert found["turned.weight"] == "it is turned"
    assert found["left.weight"] == "it is no parameter of the model"


@pytest.mark.parametrize("name", ["mlp.experts.up", "mlp.experts.1.weight"])
def test_parameters_go_by_their_names_in_the_model_and_in_files(modelled, name):
    config = FqnToConfig({name: None, "*": WeightOnlyConfig("int8")})
    found = reasons(modelled, config)
    assert found["mlp.experts.0.weight"] == found["mlp.experts.1.weight"]
    assert found["mlp.experts.0.weight"] == f"the configuration keeps {name!r}"
    left_out = reasons(modelled, WeightOnlyConfig("int8"), exclude=[name])
    assert left_out["mlp.experts.0.weight"] == "a pattern of exclude leaves it out"
    assert left_out["body.down.weight"].startswith("int8")
    only = reasons(modelled, WeightOnlyConfig("int8"), include=[name])
    assert only["mlp.experts.0.weight"].startswith("int8")
    assert only["body.down.weight"] == "no pattern of include matches it"


@pytest.mark.parametrize(
    ("of_experts", "reason"),
    [
        (Skip("experts are refused"), "experts are refused"),
        (Spec("int8", (1, 4)), "it is joined into mlp.experts.up, whose format would be int8[1×4]"),
    ],
)
def test_joined_tensors_become_what_the_whole_becomes(modelled, monkeypatch, of_experts, reason):
    def apply(dense, config, target):
        if dense.dim() == 3:
            return (
                of_experts if isinstance(of_experts, Skip) else quantize_tensor(dense, of_experts)
            )
        return quantize_tensor(dense, Spec("int8", (1, -1)))

    transform = Transform(WeightOnlyConfig, "weight_only", 1, apply)
    monkeypatch.setattr(registry, "transform_for", lambda config_type: transform)
    found = reasons(modelled, WeightOnlyConfig("int8"))
    assert found["mlp.experts.0.weight"].startswith(reason)
    assert found["body.down.weight"].startswith("int8[1×*]")


def test_modules_are_guessed_where_no_library_knows_the_model(published):
    source = published([{"linear.weight": torch.randn(6, 8)}])
    text = str(plan_checkpoint(source, WeightOnlyConfig("int8")))
    assert "modules: guessed from the names of tensors: no library knows the folder" in text


def test_a_name_may_stand_for_a_folder_elsewhere_unless_there_is_a_file(source, tmp_path, kind):
    assert find(tmp_path / "published") == source
    assert find(source / "config.json") == source / "config.json"
    assert find(Path("nothing")) == Path("nothing")


def test_a_folder_of_another_library_stays_as_it_is(source, tmp_path, kind):
    quantize_checkpoint(source, tmp_path / "out", WeightOnlyConfig("int8"))
    assert not (tmp_path / "out" / "more.txt").exists()
