"""Peak memory of converting a folder to GPTQ and back, each time in a fresh process."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from ao_core import QTensor, Spec
from ao_core.ext.saving import write_checkpoint
from ao_quant.interchange import convert_checkpoint
from benchmarking import Row, arguments, in_fresh_processes, record

#: the largest matrix of a layer and the embedding, in a model of 8 billion parameters
SHAPE, EMBEDDING = (14336, 4096), (128256, 4096)
GROUP = 128
#: MB that a process may use in addition to two of the largest tensor
ALLOWED = 256

TEXT = """\
`convert_checkpoint` of a folder with random weights (matrices of {shape} in int8, groups of {group}; with
*embedding*, one of {embedding} in bfloat16 is the largest tensor) to GPTQ, and of the result back, each in a
fresh process, whose memory is looked at every 5 ms. *anonymous* is the greatest resident memory that is of no
file (RssAnon of Linux), with that of Python and torch, which it had *before*; pages of libraries and of files
that are read, which the system can take back, are not in it. *limit* is two of the largest tensor and
{allowed} MB."""


def weights(count: int, shape: tuple[int, int], *, embedding: bool) -> Iterator[tuple[str, Tensor]]:
    """Matrices in int8 with random codes, and a dense embedding."""
    spec = Spec("int8", (1, GROUP), "float16")
    generator = torch.Generator().manual_seed(0)
    if embedding:
        yield "embed.weight", torch.randn(EMBEDDING, dtype=torch.bfloat16, generator=generator)
    for i in range(count):
        codes = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        scale = torch.rand(shape[0], shape[1] // GROUP, generator=generator).half() / 1000
        yield (
            f"layers.{i}.weight",
            QTensor({"qdata": codes, "scale": scale}, spec, shape, torch.float16),
        )


def anonymous() -> int:
    """Bytes of resident memory that are of no file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def child(to: str, folder: str) -> None:
    """Convert once and print seconds and bytes as JSON."""
    before, greatest, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            greatest[0] = max(greatest[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    source = Path(folder) / ("source" if to == "gptq" else "gptq")
    told = convert_checkpoint(source, Path(folder) / to, to)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "before": before,
                "anonymous": greatest[0],
                "equal": told.verdict == "bytes equal",
            }
        )
    )


def measure(place: Path, count: int, shape: tuple[int, int], *, embedding: bool) -> list[Row]:
    """One row for each way."""
    write_checkpoint(
        weights(count, shape, embedding=embedding), place / "source", max_shard_size="1GB"
    )
    nbytes = sum(file.stat().st_size for file in (place / "source").glob("*.safetensors"))
    largest = 2 * EMBEDDING[0] * EMBEDDING[1] if embedding else shape[0] * shape[1]
    limit = 2 * largest / 1e6 + ALLOWED
    rows: list[Row] = []
    for to in ("gptq", "ao"):
        _, printed = in_fresh_processes(__file__, (to,), 1, place)
        (run,) = printed[to]
        rows.append(
            {
                "to": to,
                "folder MB": nbytes / 1e6,
                "embedding": embedding,
                "largest MB": largest / 1e6,
                "seconds": run["seconds"],
                "bytes equal": bool(run["equal"]),
                "before MB": run["before"] / 1e6,
                "anonymous MB": run["anonymous"] / 1e6,
                "limit MB": limit,
                "verdict": "met" if run["anonymous"] / 1e6 <= limit else "missed",
            }
        )
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3])
    else:
        args = arguments(__doc__, gb=7.0, rows=SHAPE[0], columns=SHAPE[1], small_gb=0.6)
        shape, rows = (args.rows, args.columns), []
        for gb in (args.gb, args.small_gb):
            count = max(round(gb * 1e9 / (shape[0] * shape[1])), 1)
            with tempfile.TemporaryDirectory() as place:
                rows += measure(Path(place), count, shape, embedding=gb == args.gb)
        text = TEXT.format(shape=shape, embedding=EMBEDDING, group=GROUP, allowed=ALLOWED)
        record(args.json, "Memory of converting checkpoints", text, rows)
