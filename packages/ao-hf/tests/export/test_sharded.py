"""A quantized model saved by two ranks is the file of one process, and loads on one and on four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ao_core import QTensor, Spec, quantize_, quantize_tensor, save_model
from ao_core.ext import CheckpointError, UnsupportedOp
from ao_core.testing.programs import run_ranks
from ao_hf.export.flat import flatten_state, restored
from ao_hf.export.sharded import load_sharded, save_sharded

WORKER = Path(__file__).with_name("sharded_worker.py")
NAMES = ["int8", "nf4", "mx"]


def files(folder: Path) -> dict[str, bytes]:
    """All but the lock, which `save_sharded` does not write."""
    every = sorted(folder.iterdir())
    return {path.name: path.read_bytes() for path in every if path.name != "ao.lock.json"}


@pytest.mark.slow
def test_two_ranks_save_what_one_and_four_load(tmp_path: Path) -> None:
    for what, ranks in (("save", 2), ("load", 1), ("load", 4)):
        here = tmp_path / f"{what}{ranks}"
        here.mkdir()
        output = run_ranks(WORKER, ranks, here, what, str(tmp_path), *NAMES)
        assert all(f"{name}: ok" in output for name in NAMES), output
    for name in NAMES:
        whole = files(tmp_path / name / "whole")
        assert len(whole) > 2
        assert files(tmp_path / name / "sharded") == whole
        assert files(tmp_path / name / "again1") == whole
        assert files(tmp_path / name / "again4") == whole


def tiny(recipe: str | None) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 8))
    if recipe:
        quantize_(model, recipe)
    return model


def test_without_processes_it_is_save_model(tmp_path: Path) -> None:
    model = tiny("int4_weight_only/g32-asymmetric")
    save_model(model, tmp_path / "whole")
    save_sharded(model, tmp_path / "one")
    assert files(tmp_path / "one") == files(tmp_path / "whole")
    other = tiny("int4_weight_only/g32-asymmetric")
    load_sharded(other, tmp_path / "whole")
    x = torch.randn(3, 64)
    assert torch.equal(other(x), model(x))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("recipe", ["int4_weight_only/g32-asymmetric", "nf4_weight_only"])
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (dcp.HuggingFaceStorageWriter, dcp.HuggingFaceStorageReader),
        (dcp.FileSystemWriter, dcp.FileSystemReader),
    ],
    ids=["safetensors", "torch"],
)
def test_writers_and_readers_of_torch_take_flat_states(
    writer: Any, reader: Any, recipe: str, tmp_path: Path
) -> None:
    model, other = tiny(recipe), tiny(recipe)
    flat: dict[str, Any] = dict(flatten_state(model.state_dict()).tensors)
    dcp.save(flat, storage_writer=writer(str(tmp_path)), no_dist=True)
    state = other.state_dict()
    fresh = {name: torch.empty_like(t) for name, t in flatten_state(state).tensors.items()}
    dcp.load(fresh, storage_reader=reader(str(tmp_path)), no_dist=True)
    for name, tensor in state.items():
        whole = restored(tensor, name, fresh) if isinstance(tensor, QTensor) else fresh[name]
        tensor.copy_(whole)
    x = torch.randn(3, 64)
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (None, "unknown to the model: 0.weight.qdata"),
        ("int4_weight_only/g128-symmetric", "0.weight is int4.* in the model, and int8"),
    ],
)
def test_a_model_of_another_format_stays_as_it_was(
    recipe: str | None, reason: str, tmp_path: Path
) -> None:
    save_model(tiny("int8_weight_only"), tmp_path)
    model = tiny(recipe)
    x = torch.randn(3, 64)
    before = model(x)
    with pytest.raises(CheckpointError, match=reason):
        load_sharded(model, tmp_path)
    assert torch.equal(model(x), before)


def test_a_model_without_values_is_refused(tmp_path: Path) -> None:
    save_model(tiny(None), tmp_path)
    with pytest.raises(CheckpointError, match="meta device"):
        load_sharded(tiny(None).to("meta"), tmp_path)


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="step is a int"):
        flatten_state({"step": 3})  # type: ignore[dict-item]


def test_a_shard_of_other_rows_than_torch_expects_is_refused() -> None:
    store = FakeStore()
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=store)
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = quantize_tensor(torch.randn(4, 64), Spec("int8", (1, 32)))
        whole = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 64)), stride=(64, 1)
        )
        with pytest.raises(UnsupportedOp, match=r"w.qdata: this rank holds \(4, 64\) of \(6, 64\)"):
            flatten_state({"w": whole})
    finally:
        torch.distributed.destroy_process_group()
