"""Killed at any moment, calibration from files goes on where it was, and ends with the same bytes."""

from __future__ import annotations

import json

import pytest

from ao_core.testing.warm import run_python

# Runs in forked children, each of which is killed before one of the calls that factor a Hessian or touch the
# disk, then in one that is killed later, then until it is done. Prints the moments, whether children were
# killed, how many factors the last run needed, and whether the bytes are those of a run in peace.
KILLED = """
import hashlib, json, os, pathlib, random, signal, sys
import torch
from ao_core import quantize_checkpoint
from ao_quant import AutoRoundConfig, GPTQConfig, Int4WeightOnlyConfig

torch.set_num_threads(1)
os.fsync = lambda file: None  # what a kill leaves does not depend on it
source, root, count = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[4])
base = Int4WeightOnlyConfig(32)
config = GPTQConfig(base) if sys.argv[3] == "gptq" else AutoRoundConfig(base, iterations=3, bfloat16=False)
generator = torch.Generator().manual_seed(1)
data = [
    {"input_ids": torch.randint(0, 96, (2, 24), generator=generator), "use_cache": False} for _ in range(3)
]
left, factors = [10**9], [0]

def counted(function, kind=None):
    def run(*args, **kwargs):
        left[0] -= 1
        if kind is not None:
            kind[0] += 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return run

def child(target, moment):
    "Quantize in another process, which is killed at that moment; whether it was."
    pid = os.fork()
    if pid == 0:
        os.replace, os.open = counted(os.replace), counted(os.open)
        torch.linalg.cholesky_ex = counted(torch.linalg.cholesky_ex, factors)
        left[0] = moment
        quantize_checkpoint(source, target, config, data=data)
        (root / "calls").write_text(json.dumps([moment - left[0], factors[0]]))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)

def tree(target):
    found = sorted(p for p in target.rglob("*") if p.is_file() and not p.name.startswith("ao_report"))
    return {str(p.relative_to(target)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}

assert not child(root / "peace", 10**9)
calls, all_factors = json.loads((root / "calls").read_text())
expected = tree(root / "peace")
for number in range(count):
    rng, target = random.Random(number), root / f"killed-{number}"
    first = int(calls * (number + rng.random()) / count)
    killed = [child(target, moment) for moment in (first, rng.randrange(calls // 2))]
    if not killed[-1]:
        killed.append(False)
    else:
        killed.append(child(target, 10**9))
    again = json.loads((root / "calls").read_text())[1]
    print(json.dumps([first / calls, killed, again / all_factors, tree(target) == expected]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "count"), [("gptq", 3), ("autoround", 2)])
def test_killed_while_it_calibrates(tmp_path, llama, method: str, count: int) -> None:
    model = llama(num_hidden_layers=3, tie_word_embeddings=False).bfloat16()
    model.save_pretrained(tmp_path / "src", max_shard_size="100KB")
    (tmp_path / "runs").mkdir()
    done = run_python("-c", KILLED, tmp_path / "src", tmp_path / "runs", method, count)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == count
    for moment, killed, again, same in runs:
        assert same, moment
        assert killed[0]
        assert not killed[-1]
        assert again <= 1
    # blocks that were done before a late kill are not solved for again
    assert min(again for _, _, again, _ in runs) < 0.7
