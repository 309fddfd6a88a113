"""Peak memory of quantizing a model while it is loaded, each time in a fresh process."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from bench_load import build, pretrained

from benchmarking import Row, arguments, in_fresh_processes, record

RECIPES = ("int4_weight_only", "nf4_weight_only")
#: few wide layers: 1.07 GB in bfloat16, of which a quarter is embedding and head
SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
}
#: MB that a process may use in addition to the weights
ALLOWED = 300

TEXT = """\
`from_pretrained(quantization_config=AoConfig(recipe))` of a Llama model with random weights in bfloat16,
each time in a fresh process, whose memory is looked at every 5 ms. *anonymous* is the greatest memory of
its own while the model is loaded, with that of Python, torch and transformers, which it had *before*.
*files* is the greatest mapped memory of files, which the system takes back when it needs it; the embedding
stays there. *limit* is 0.30 of the model's bytes and {allowed} MB."""


def memory() -> tuple[int, int]:
    """Bytes of resident memory: anonymous, and of files."""
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def child(recipe: str, folder: str) -> None:
    """Load once and print seconds and bytes as JSON."""
    import time

    import transformers

    from ao_hf import AoConfig

    transformers.logging.disable_progress_bar()
    before, seen, done = memory(), [memory()], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    model = pretrained(Path(folder), quantization_config=AoConfig(recipe))
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "before": before[0],
                "anonymous": max(anonymous for anonymous, _ in seen),
                "files": max(files for _, files in seen),
                "after": model.get_memory_footprint(),  # type: ignore[operator]
            }
        )
    )


def measure(rounds: int) -> list[Row]:
    """One row for each recipe."""
    with tempfile.TemporaryDirectory() as text:
        dense = Path(text) / "bf16"
        build(dense, **SIZES)
        nbytes = sum(file.stat().st_size for file in dense.glob("*.safetensors"))
        _, printed = in_fresh_processes(__file__, RECIPES, rounds, dense)
    limit = 0.30 * nbytes + ALLOWED * 1e6
    rows: list[Row] = []
    for recipe, runs in printed.items():
        greatest = {key: max(run[key] for run in runs) / 1e6 for key in runs[0]}
        rows.append(
            {
                "recipe": recipe,
                "model MB": nbytes / 1e6,
                "quantized MB": greatest["after"],
                "seconds": min(run["seconds"] for run in runs),
                "before MB": greatest["before"],
                "anonymous MB": greatest["anonymous"],
                "files MB": greatest["files"],
                "limit MB": limit / 1e6,
                "verdict": "met" if greatest["anonymous"] * 1e6 <= limit else "missed",
            }
        )
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3])
    else:
        args = arguments(__doc__, rounds=3)
        text = TEXT.format(allowed=ALLOWED)
        record(args.json, "Memory of quantizing while loading", text, measure(args.rounds))
