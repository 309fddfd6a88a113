"""Killed at any moment, or out of disk space, `save_model` leaves a whole checkpoint behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ao_core import WHOLE, Spec, load_model, quantize_tensor, save_model
from ao_core.errors import CheckpointError
from ao_core.testing.warm import run_python

# Saves over an older checkpoint in forked children, each of which is killed before one further of the
# calls that touch the disk, until one child gets through; prints what was found after each.
KILLED = """
import ctypes, json, os, pathlib, signal, sys, zlib
import torch
from safetensors.torch import save_file
from torch import nn
from ao_core import load_model, save_model

STEPS = [(zlib, "crc32"), (os, "fsync"), (os, "replace"), (os, "open"),
         (pathlib.Path, "unlink"), (pathlib.Path, "mkdir")]

def model(value):
    linears = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    for parameter in linears.parameters():
        nn.init.constant_(parameter, value)
    return linears

def die_before(call):
    left = [call]
    def counted(function):
        def run(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*args, **kwargs)
        return run
    for owner, name in STEPS:
        setattr(owner, name, counted(getattr(owner, name)))

def make(directory, before):
    "A checkpoint of the value 1: of shards of that size, or as another program writes it."
    if before.isdecimal():
        return save_model(model(1.0), directory, max_shard_size=int(before))
    os.mkdir(directory)
    tensors = model(1.0).state_dict()
    names = {"listed": ["model.safetensors"], "unlisted": ["a.safetensors", "b.safetensors"],
             "numbered": [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]}[before]
    of = {name: names[i % len(names)] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if of[n] == file}, os.path.join(directory, file))
    if before == "listed":
        with open(os.path.join(directory, "model.safetensors.index.json"), "w") as file:
            json.dump({"weight_map": of}, file)

def values(directory):
    found = model(0.0)
    load_model(found, directory)
    (value,) = {v for p in found.parameters() for v in p.flatten().tolist()}
    return value

root, before, after = sys.argv[1], sys.argv[2], int(sys.argv[3])
for call in range(1000):
    directory = os.path.join(root, str(call))
    make(directory, before)
    old = set(os.listdir(directory))
    child = os.fork()
    if child == 0:
        die_before(call)
        save_model(model(2.0), directory, max_shard_size=after)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = values(directory)
    save_model(model(3.0), directory, max_shard_size=after)
    assert values(directory) == 3.0
    print(json.dumps([found, os.WIFSIGNALED(status), sorted(os.listdir(directory))]))
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0
        break
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks to be killed")
@pytest.mark.parametrize(
    "before",
    ["1000000000", "1200", "listed", "unlisted", "numbered"],
    ids=["from one file", "from shards", "from one with an index", "from two", "from shards alone"],
)
@pytest.mark.parametrize("after", [10**9, 1200], ids=["to one file", "to shards"])
def test_killed_at_every_step(tmp_path, before, after):
    out = run_python("-c", KILLED, tmp_path, before, after, check=True)
    runs = [json.loads(line) for line in out.stdout.splitlines()]
    found = [value for value, _, _ in runs]
    killed = [was for _, was, _ in runs]
    assert killed == [True] * (len(runs) - 1) + [False]
    assert len(runs) >= 12
    # the old values up to some step, the new ones from then on, and never anything else
    assert found == sorted(found)
    assert set(found) == {1.0, 2.0}
    for _, _, files in runs:
        assert "ao.lock.json" in files
        others = ("a.safetensors", "ao.lock.json", "b.safetensors")
        ours = [name for name in files if name not in others]
        # where an index was the pointer to `model.safetensors`, one stays it
        one = 2 if before == "listed" and "model.safetensors" not in ours else 1
        assert len(ours) == (one if after == 10**9 else 3)


def linear(seed):
    torch.manual_seed(seed)
    layer = nn.Linear(64, 64)
    weight = quantize_tensor(layer.weight.detach(), Spec("int8", (1, WHOLE)))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def same(a, b):
    return torch.equal(a.weight.dequantize(), b.weight.dequantize()) and torch.equal(a.bias, b.bias)


@pytest.mark.parametrize("size", ["1GB", 100], ids=["one file", "shards"])
@pytest.mark.parametrize("step", range(12))
def test_a_full_disk_at_any_step(tmp_path, full_disk, size, step):
    old, new = linear(0), linear(1)
    save_model(old, tmp_path, max_shard_size=size)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with full_disk(step, "fsync", "replace") as disk:
        message = ""
        try:
            save_model(new, tmp_path, max_shard_size=size)
        except CheckpointError as error:
            message = str(error)
    found = nn.Linear(64, 64)
    load_model(found, tmp_path)
    if disk.calls <= step:
        assert not message
        assert same(found, new)
        return
    assert message.startswith(f"{tmp_path}: could not save: No space left on device")
    assert not list(tmp_path.glob(".saving-*"))
    if same(found, old):
        for name, data in files.items():
            assert (tmp_path / name).read_bytes() == data
    else:
        assert same(found, new)
        assert disk.calls == step + 1  # only the last sync came too late


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_file_size_limit_of_the_system(tmp_path):
    """Not a simulation: the kernel refuses to let the file grow."""
    save_model(linear(0), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    script = f"""
import resource, torch
from torch import nn
from ao_core import save_model
from ao_core.errors import CheckpointError
model = nn.Linear(512, 512)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_model(model, {str(tmp_path)!r})
except CheckpointError as error:
    print(error)
"""
    out = run_python("-c", script, check=True)
    assert "could not save: File too large" in out.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"ao.lock.json", "model.safetensors"}
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    save_model(linear(0), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_model(linear(1), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"ao.lock.json", "model.safetensors"}
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not save"):
        save_model(linear(0), tmp_path / "file" / "model")
    assert Path(tmp_path / "file").read_text() == ""
