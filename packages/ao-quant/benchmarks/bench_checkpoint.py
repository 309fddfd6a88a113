"""A checkpoint larger than the memory that a process may use is quantized, and killed meanwhile."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from benchmarking import Row, arguments, record
from process_memory import peak, reset_peak, resident

TEXT = """\
`quantize_checkpoint` on a sharded checkpoint of random bfloat16 weights with the shapes of a Llama, in a
process that may not allocate more than the *limit* in all (`RLIMIT_DATA`). *stated* is the memory that it
says before it starts, *peak* the greatest resident memory beyond what the process had. Then the same with the
process killed (`SIGKILL`) at random times, and called again each time; *same bytes*: its files have the
SHA-256 of those of the run in peace."""

HIDDEN, MLP = 4096, 14336


def shapes(size: int, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of tensors of at least `size` bytes in bfloat16."""
    yield "model.embed_tokens.weight", (vocabulary, HIDDEN)
    left = size - 4 * vocabulary * HIDDEN
    for layer in range(10**6):
        if left <= 0:
            break
        name = f"model.layers.{layer}"
        block = {
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (HIDDEN // 4, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (HIDDEN // 4, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{name}.mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{name}.mlp.up_proj.weight": (MLP, HIDDEN),
            f"{name}.mlp.down_proj.weight": (HIDDEN, MLP),
        }
        for tensor, shape in block.items():
            yield tensor, shape
            left -= 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (vocabulary, HIDDEN)


def write_source(folder: Path, size: int, vocabulary: int) -> None:
    """A random checkpoint of at least `size` bytes, in files of 2 GB at most."""
    import torch

    from ao_core.ext.saving import write_checkpoint

    values = torch.randn(1 << 24).bfloat16()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, shape) in enumerate(shapes(size, vocabulary)):
            count = torch.Size(shape).numel()
            repeated = values.roll(7919 * number).repeat(-(-count // values.numel()))
            yield name, repeated[:count].view(shape)

    write_checkpoint(tensors(), folder, max_shard_size="2GB")


def child(source: str, target: str, recipe: str, limit: int) -> None:
    """Quantize within a limit of allocated bytes, and print seconds and bytes as JSON."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    from ao_core.ext import registry
    from ao_quant import plan_checkpoint, quantize_checkpoint

    registry.recipes.names()  # plugins are loaded
    stated = plan_checkpoint(source, recipe).peak_memory
    before = resident()
    reset_peak()
    start = time.perf_counter()
    report = quantize_checkpoint(source, target, recipe)
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "seconds": seconds,
                "before": report.bytes_before,
                "after": report.bytes_after,
                "stated": stated,
                "peak": peak() - before,
            }
        )
    )


def measure(folder: Path, recipes: list[str], limit: int, kills: int) -> Iterator[Row]:
    """One row for each recipe."""
    for recipe in recipes:
        name = recipe.replace("/", "-")
        command = [sys.executable, __file__, "--child", str(folder / "source")]
        options = [recipe, str(limit)]
        done = subprocess.run(
            [*command, str(folder / name), *options], check=True, stdout=subprocess.PIPE, text=True
        )
        found = json.loads(done.stdout)
        hashes = (folder / name / "ao_manifest.json").read_bytes()
        shutil.rmtree(folder / name)
        row: Row = {
            "recipe": recipe,
            "checkpoint GB": found["before"] / 1e9,
            "result GB": found["after"] / 1e9,
            "limit GB": limit / 1e9,
            "stated GB": found["stated"] / 1e9,
            "peak GB": found["peak"] / 1e9,
            "seconds": found["seconds"],
            "GB/s": found["before"] / 1e9 / found["seconds"],
        }
        if kills:
            target = folder / f"{name}-killed"
            killed = _with_kills([*command, str(target), *options], target, found["seconds"], kills)
            same = (target / "ao_manifest.json").read_bytes() == hashes
            row |= {"kills": killed, "same bytes": "yes" if same else "no"}
            shutil.rmtree(target)
        yield row


def _with_kills(command: list[str], target: Path, seconds: float, kills: int) -> int:
    """Call again and again, each time killed after a while, then until it is done; how often it was."""
    rng, killed = random.Random(0), 0
    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(2, 2 + 2 * seconds / (kills + 1)))
            return killed  # it was faster
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
            if _is_published(target):  # killed on its way out, with all done
                return killed
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return killed


def _is_published(target: Path) -> bool:
    """Whether nothing is left to do; where that is so, all of it is read once more."""
    from ao_core import verify_checkpoint
    from ao_core.ext import CheckpointError

    try:
        verify_checkpoint(target)
    except CheckpointError:
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:5], int(sys.argv[5]))
    else:
        args = arguments(
            __doc__,
            size=8.0,
            limit=2.0,
            kills=20,
            recipes="int4_weight_only,nf4_weight_only",
            vocabulary=32000,
            folder=tempfile.gettempdir(),
        )
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            write_source(Path(scratch) / "source", int(args.size * 1e9), args.vocabulary)
            found = measure(
                Path(scratch), args.recipes.split(","), int(args.limit * 1e9), args.kills
            )
            record(args.json, "A checkpoint larger than memory", TEXT, list(found))
