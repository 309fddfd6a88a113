"""Kills at random times: `python tests/files/kills.py --kills 200 --seed 0`.

A process that saves a model, or quantizes a checkpoint, is killed after a random time. What was there
before, or the new checkpoint, must be there, whole; and the same call again must end with the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ao_core import WeightOnlyConfig, load_model, open_checkpoint, quantize_checkpoint, save_model
from ao_core.checkpoints import pieces
from ao_core.ext import CheckpointError

CONFIG = WeightOnlyConfig("int4", 32, "bfloat16")
#: what is there before: nothing, ours in one file or some, or another program's
BEFORE = ("nothing", "one", "shards", "listed", "unlisted", "numbered")
SIZES = {"one": 10**9, "shards": 300_000}


def model(value: float) -> nn.ModuleList:
    """Layers that all have one value."""
    layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(6)])
    for parameter in layers.parameters():
        nn.init.constant_(parameter, value)
    return layers


def make(folder: Path, kind: str) -> None:
    """A checkpoint of the value 1, as this program or another writes it."""
    if kind in SIZES:
        save_model(model(1.0), folder, max_shard_size=SIZES[kind])
        return
    folder.mkdir()
    if kind == "nothing":
        return
    tensors = model(1.0).state_dict()
    names = ["model.safetensors"] if kind == "listed" else ["a.safetensors", "b.safetensors"]
    if kind == "numbered":
        names = [f"model-{i + 1:05}-of-00002.safetensors" for i in range(2)]
    of = {name: names[i % len(names)] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if of[name] == file}, folder / file)
    if kind == "listed":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))


def value(folder: Path) -> float | None:
    """The one value of what is there; None: there is nothing."""
    target = model(0.0)
    try:
        load_model(target, folder)
    except CheckpointError:
        return None
    (found,) = {v for p in target.parameters() for v in p.detach().flatten().tolist()}
    return found


def killed(work: Callable[[], object], after: float) -> bool:
    """Do some work in another process, which is killed after so many seconds; whether it was."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


def seconds(work: Callable[[], object]) -> float:
    """How long some work takes in another process."""
    begin = time.monotonic()
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    os.waitpid(pid, 0)
    return time.monotonic() - begin


def save_case(root: Path, rng: random.Random, outcome: Counter[str]) -> None:
    """Kill `save_model`."""
    before, after = rng.choice(BEFORE), rng.choice(list(SIZES))
    folder, peace = root / "saved", root / "peace"
    make(folder, before)
    shutil.copytree(folder, peace)

    def work(where: Path = folder) -> None:
        save_model(model(2.0), where, max_shard_size=SIZES[after])

    was_killed = killed(work, rng.uniform(0, 1.1) * seconds(lambda: work(peace)))
    found = value(folder)
    old = None if before == "nothing" else 1.0
    wanted = (old, 2.0) if was_killed else (2.0,)
    assert found in wanted, f"{before} to {after}: {found} is neither the old nor the new value"
    outcome[
        f"save_model: {'killed' if was_killed else 'done'}, {'new' if found == 2.0 else 'old'}"
    ] += 1
    work()
    assert value(folder) == 2.0, f"{before} to {after}: not saved again"
    left = sorted(path.name for path in folder.iterdir())
    assert not [name for name in left if name.startswith(".")], (
        f"{before} to {after}: {left} is left"
    )


def tree(folder: Path) -> dict[str, str]:
    """The bytes of a result but its reports, which have times in them, and an empty lock.

    That is the last file of the work to go, and the next call removes it.
    """
    found = sorted(
        p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(("ao_report", "lock"))
    )
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def finished(folder: Path) -> bool:
    """Whether a run has nothing left to do there but its last words."""
    manifest = (folder / "ao_manifest.json").exists()
    return manifest and not (folder / ".quantizing" / "state.json").exists()


def quantize_case(root: Path, rng: random.Random, outcome: Counter[str]) -> None:
    """Kill `quantize_checkpoint`, up to three times, and go on each time."""
    before = rng.choice(("nothing", "one", "shards", "listed"))
    source, folder, peace = root / "source", root / "saved", root / "peace"
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    layers = model(1.0)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    save_model(layers, source, max_shard_size=400_000)
    (source / "config.json").write_text("{}")
    make(folder, before)
    shutil.copytree(folder, peace)

    def work(where: Path = folder) -> None:
        quantize_checkpoint(source, where, CONFIG, max_shard_size=100_000, overwrite=True)

    whole = seconds(lambda: work(peace))
    expected, times = tree(peace), rng.choice((1, 1, 2, 3))
    for _ in range(times):
        if finished(folder):
            break
        if not killed(work, rng.uniform(0, 1.1) * whole):
            outcome["quantize_checkpoint: done"] += 1
            break
        try:
            found = open_checkpoint(folder).entries["0.weight"].spec is not None
            what = "new" if found else "old"
        except CheckpointError:
            what = "old"
            assert before == "nothing", f"{before}: neither the old nor the new one is there"
        outcome[f"quantize_checkpoint: killed, {what}"] += 1
    if not finished(folder):
        work()
    made = tree(folder)
    other = [name for name in {*made, *expected} if made.get(name) != expected.get(name)]
    assert not other, f"{before}: other bytes of {other} after {times} kills"


def run(kills: int, seed: int) -> tuple[list[str], Counter[str]]:
    """What was wrong, and how cases ended."""
    failures: list[str] = []
    outcome: Counter[str] = Counter()
    for number in range(kills):
        rng = random.Random(f"{seed}:{number}")
        with tempfile.TemporaryDirectory() as scratch:
            case = rng.choice((save_case, quantize_case))
            try:
                case(Path(scratch), rng, outcome)
            except Exception as error:
                failures.append(f"kill {number} of seed {seed}, {case.__name__}: {error!r}")
    return failures, outcome


def main() -> int:
    """Run cases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pieces.SIZE = 300_000
    begin = time.monotonic()
    failures, outcome = run(options.kills, options.seed)
    for line in [*failures, *(f"{name}: {count}" for name, count in sorted(outcome.items()))]:
        print(line)
    took = time.monotonic() - begin
    print(f"seed {options.seed}: {options.kills} kills, {len(failures)} wrong, {took:.0f} s")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
