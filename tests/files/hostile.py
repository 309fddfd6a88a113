"""Hostile files: `python tests/files/hostile.py --cases 3000 --seed 0`.

Each case changes the files of a checkpoint, of unfinished work or of GGUF, and lets everything that reads
such files read them, in a process that may take a certain time and memory. Only an `AoError` may come out
of it, the model must be as it was or loaded whole and of use, and nothing outside may change.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from changes import CHANGES
from material import CONFIG, make, model
from others import change_optimizer, change_text, make_others, optimizers, texts
from torch import nn

from ao_core import (
    load_model,
    open_checkpoint,
    quantize_checkpoint,
    verify_checkpoint,
)
from ao_core.checkpoints import pieces
from ao_core.ext import AoError
from ao_core.ext.saving import flat_to_state_dict

#: seconds, and bytes beyond what the process has, that a case may take
SECONDS, MEMORY = 60, 2 << 30
#: folders that cases begin with
KINDS = ("one", "one", "many", "many", "done", "half", "late", "gguf", "texts", "optimizers")
# -- what reads ------------------------------------------------------------------------------------


class Wrong(Exception):
    """Something that must never happen, whatever a file says."""


def load(folder: Path, *, verify: bool, device: str) -> None:
    """Load into a model, which is unchanged after an error and of use without one."""
    target = model(seed=1, dense=True).to(device)
    before = {
        name: (tensor, tensor.clone()) for name, tensor in target.state_dict(keep_vars=True).items()
    }
    try:
        load_model(target, folder, verify=verify)
    except AoError:
        for name, tensor in target.state_dict(keep_vars=True).items():
            same = tensor is before[name][0] and (
                tensor.is_meta or torch.equal(tensor, before[name][1])
            )
            if not same:
                raise Wrong(f"{name} changed, although loading failed") from None
        raise
    for name, layer in target.items():
        weight, bias = layer.weight, layer.bias
        x = torch.ones(3, layer.in_features, dtype=weight.dtype)
        try:
            nn.functional.linear(x, weight, bias.to(weight.dtype))
            weight.detach().dequantize() if hasattr(weight, "spec") else weight.float()
        except Exception as error:
            spec = getattr(weight, "spec", weight.dtype)
            raise Wrong(f"{name} ({spec}) is loaded, and of no use: {error!r}") from error


def inspected(folder: Path) -> None:
    """`ao inspect` and `ao verify`, their errors let through."""
    from typer.testing import CliRunner

    from ao_core.cli.app import make_app

    for command in (["inspect", str(folder)], ["verify", str(folder), "--json"]):
        done = CliRunner().invoke(make_app(), command, env={"AO_DEBUG": "1"})
        if done.exception is not None and not isinstance(done.exception, (AoError, SystemExit)):
            raise done.exception


def everything(folder: Path, rng: random.Random, outcome: Counter[str]) -> None:
    """Let all that reads such files read them."""
    acts: list[tuple[str, Any]] = []
    if folder.name in ("half", "late"):
        acts = [
            ("resume", lambda: resume(folder, rng)),
            ("verify", lambda: verify_checkpoint(folder)),
        ]
    elif folder.name == "texts":
        acts = texts(folder)
    elif folder.name == "optimizers":
        acts = [("optimizer", lambda: optimizers(folder))]
    elif folder.name == "gguf":
        acts = [("gguf", lambda: gguf(folder / "model.gguf"))]
    else:
        acts = [
            ("open", lambda: open_checkpoint(folder)),
            (
                "load",
                lambda: load(folder, verify=rng.random() < 0.3, device=rng.choice(("cpu", "meta"))),
            ),
            ("verify", lambda: verify_checkpoint(folder)),
            ("inspect", lambda: inspected(folder)),
            ("flat", lambda: flat(folder)),
            ("quantize", lambda: quantize(folder)),
        ]
    for name, act in acts:
        try:
            act()
            outcome[f"{name}: read"] += 1
        except AoError as error:
            str(error).encode()
            outcome[f"{name}: refused"] += 1


def gguf(path: Path) -> None:
    """Read, and use what is read."""
    from ao_quant.gguf import read_gguf

    for tensor in read_gguf(path).tensors.values():
        tensor.dequantize() if hasattr(tensor, "spec") else tensor.double()


def flat(folder: Path) -> None:
    """`flat_to_state_dict` of what a file holds."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_file():
            import safetensors

            try:
                with safetensors.safe_open(path, "pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    metadata = file.metadata() or {}
            except Exception:
                return  # of the safetensors package
            flat_to_state_dict(tensors, metadata)


def quantize(folder: Path) -> None:
    """Quantize to another folder; what comes out of it is whole."""
    target = folder.parent / "out"
    quantize_checkpoint(folder, target, "int8_weight_only")
    if wrong := [file for file in verify_checkpoint(target) if file.problem]:
        raise Wrong(f"the result of a run is damaged: {wrong}")


def resume(folder: Path, rng: random.Random) -> None:
    """Go on with damaged work; with overwrite=True, it always ends with a whole result."""
    source = folder.parent / "dense"
    overwrite = rng.random() < 0.5
    try:
        quantize_checkpoint(source, folder, CONFIG, max_shard_size=30_000, overwrite=overwrite)
    except AoError as error:
        if overwrite and ".quantizing is there and is not a directory" not in str(error):
            raise Wrong(f"overwrite=True does not help: {error}") from error
        raise
    if wrong := [
        file
        for file in verify_checkpoint(folder)
        if "is not listed" not in file.problem and file.problem
    ]:
        raise Wrong(f"the result of a run is damaged: {wrong}")
    entries = open_checkpoint(folder).entries
    if entries.keys() != open_checkpoint(source).entries.keys():
        raise Wrong("the result of a run has other tensors")


# -- cases -----------------------------------------------------------------------------------------


def state_of(folder: Path) -> dict[str, str]:
    """All that is in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path)] = (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        )
    return found


def gguf_change(path: Path, rng: random.Random) -> str:
    """Numbers of a header that are others, or noise."""
    data = bytearray(path.read_bytes())
    end = min(len(data), 700)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, size = rng.randrange(end - 8), rng.choice((1, 4, 8))
        value = rng.choice(
            (
                0,
                1,
                2,
                9,
                12,
                255,
                (1 << 31) - 1,
                (1 << 63) - 1,
                (1 << 64) - 1,
                1 << 40,
                rng.randrange(64),
            )
        )
        data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data))]
    path.write_bytes(bytes(data))
    return "numbers of the header"


def prepared(number: int, seed: int, base: Path, root: Path) -> tuple[Path, random.Random, str]:
    """The folder of a case, changed."""
    rng = random.Random(f"{seed}:{number}")
    name = rng.choice(KINDS)
    folder = root / name
    shutil.copytree(base / name, folder)
    shutil.copytree(base / "sentinel", root / "sentinel")
    if name in ("half", "late"):
        (root / "dense").symlink_to(base / "dense")
        work = folder / ".quantizing"
        if state := (work / "state.json"):  # that of the copy is of the same job
            state.touch()
    if name == "gguf" and rng.random() < 0.8:
        return folder, rng, gguf_change(folder / "model.gguf", rng)
    own = {"texts": change_text, "optimizers": change_optimizer}.get(name)
    if own is not None:
        return folder, rng, str(own(folder, rng))
    kinds = list(CHANGES)
    what = None
    while what is None:
        kind = rng.choice(kinds)
        what = CHANGES[kind](folder, rng)
    return folder, rng, f"{kind}: {what}"


def run_case(number: int, seed: int, base: Path, outcome: Counter[str]) -> str:
    """Run one case; empty, or what was wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        folder, rng, what = prepared(number, seed, base, root)
        outside = state_of(root / "sentinel")
        wrong = ""
        try:
            everything(folder, rng, outcome)
        except BaseException:
            wrong = f"case {number} of seed {seed}, {folder.name}, {what}\n{traceback.format_exc()}"
        known = {folder.name, "sentinel", "out", "dense", "away"}
        if state_of(root / "sentinel") != outside or {path.name for path in root.iterdir()} - known:
            wrong += f"case {number} of seed {seed}, {folder.name}, {what}: wrote outside\n"
        return wrong


def worker(numbers: list[int], seed: int, base: Path, pipe: int) -> None:
    """Run cases in this process, and tell of each; the numbers of calls at the end."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    warnings.simplefilter("ignore")
    outcome: Counter[str] = Counter()
    for number in numbers:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            wrong = run_case(number, seed, base, outcome)
        os.write(pipe, repr((number, wrong[-3000:])).encode() + b"\n")
    os.write(pipe, repr(dict(outcome)).encode() + b"\n")


def lines(pipe: int) -> Iterator[str]:
    """What a worker tells; ends when it does, or when it is silent for too long."""
    buffer = b""
    while True:
        if not select.select([pipe], [], [], SECONDS)[0]:
            return
        data = os.read(pipe, 1 << 16)
        if not data:
            return
        *whole, buffer = (buffer + data).split(b"\n")
        yield from (line.decode() for line in whole)


def run(cases: int, seed: int, base: Path) -> tuple[list[str], Counter[str]]:
    """Run all cases; what was wrong, and how often what was read or refused."""
    failures: list[str] = []
    outcome: Counter[str] = Counter()
    todo = list(range(cases))
    while todo:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                worker(todo, seed, base, write)
            finally:
                os._exit(0)
        os.close(write)
        for line in lines(read):
            told = ast.literal_eval(line)
            if isinstance(told, dict):
                outcome.update(told)
            else:
                todo.remove(told[0])
                failures += [told[1]] if told[1] else []
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if todo:
            failures.append(f"case {todo.pop(0)} of seed {seed} hung, or ended its process\n")
    return failures, outcome


def main() -> int:
    """Run cases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, its traceback shown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.fsync = lambda file: None
    pieces.SIZE = 30_000
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        make(base)
        make_others(base)
        if options.only is not None:
            wrong = run_case(options.only, options.seed, base, Counter())
            print(wrong or "as it must be")
            return int(bool(wrong))
        failures, outcome = run(options.cases, options.seed, base)
    for failure in failures:
        print(failure)
    for name, count in sorted(outcome.items()):
        print(f"{name}: {count}")
    seconds = time.monotonic() - begin
    print(f"seed {options.seed}: {options.cases} cases, {len(failures)} wrong, {seconds:.0f} s")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
