"""GPTQ of a Llama shape from files to files: seconds and memory for each number of blocks."""

from __future__ import annotations

import argparse
import json
import shutil
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
`quantize_checkpoint(src, dst, GPTQConfig(Int4WeightOnlyConfig(128)), data=windows)` on random bfloat16
weights with the shapes of a Llama and random tokens, in a process of its own for each number of *blocks*.
*stated* is the memory that it says before it starts, *peak* the greatest resident memory beyond what the
process had.
A row with fewer blocks than a model has measures what a block costs, since cost is linear in them."""


def write_source(folder: Path, blocks: int, hidden: int, mlp: int, vocabulary: int) -> None:
    """The folder of a random model of transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ao_core.ext.saving import write_checkpoint

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 512, 1),
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in model.state_dict().items():
            drawn = torch.randn(value.shape, generator=generator)
            scale = value.shape[-1] ** -0.5
            yield name, (drawn * scale if value.dim() > 1 else 1 + drawn * 0.1).bfloat16()

    write_checkpoint(tensors(), folder, max_shard_size="1GB")
    config.save_pretrained(folder)


def child(
    source: str, target: str, tokens: int, window: int, vocabulary: int, threads: int
) -> None:
    """Quantize, and print seconds and bytes as JSON."""
    import torch

    torch.set_num_threads(threads)
    from ao_quant import GPTQConfig, Int4WeightOnlyConfig, plan_checkpoint, quantize_checkpoint

    generator = torch.Generator().manual_seed(1)
    data = [
        {
            "input_ids": torch.randint(vocabulary, (1, window), generator=generator),
            "use_cache": False,
        }
        for _ in range(tokens // window)
    ]
    config = GPTQConfig(Int4WeightOnlyConfig(128))
    stated = plan_checkpoint(source, config, data=data).peak_memory
    before = resident()
    reset_peak()
    start = time.perf_counter()
    report = quantize_checkpoint(source, target, config, data=data)
    seconds = time.perf_counter() - start
    errors = [r.error_vs_rtn for r in report if r.error_vs_rtn is not None]
    found = {
        "seconds": seconds,
        "stated": stated,
        "peak": peak() - before,
        "error": sum(errors) / len(errors),
        "rows": max(r.rows or 0 for r in report),
    }
    print(json.dumps(found))


def measure(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """One row for each number of blocks."""
    options = vars(args)
    for blocks in map(int, options["blocks"].split(",")):
        source, target = folder / "source", folder / "made"
        write_source(source, blocks, options["hidden"], options["mlp"], options["vocabulary"])
        numbers = [options[name] for name in ("tokens", "window", "vocabulary", "threads")]
        command = [
            sys.executable,
            __file__,
            "--child",
            str(source),
            str(target),
            *map(str, numbers),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        shutil.rmtree(source)
        shutil.rmtree(target)
        yield {
            "hidden": options["hidden"],
            "MLP": options["mlp"],
            "blocks": blocks,
            "tokens": found["rows"],
            "threads": options["threads"],
            "seconds": found["seconds"],
            "seconds per block": found["seconds"] / blocks,
            "stated GB": found["stated"] / 1e9,
            "peak GB": found["peak"] / 1e9,
            "error / rounding": found["error"],
        }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:8]))
    else:
        parsed = arguments(
            __doc__,
            blocks="2,3",
            hidden=2048,
            mlp=5632,
            vocabulary=32000,
            tokens=32768,
            window=2048,
            threads=2,
            folder=tempfile.gettempdir(),
        )
        with tempfile.TemporaryDirectory(dir=parsed.folder) as scratch:
            rows = list(measure(parsed, Path(scratch)))
        record(parsed.json, "GPTQ of a Llama shape", TEXT, rows)
