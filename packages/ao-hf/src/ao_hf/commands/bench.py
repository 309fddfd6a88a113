"""`ao bench`: how fast a model generates as it is, quantized, and with quantized caches, side by side."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ao_hf.generation import Measured
    from ao_hf.generation.measuring import Runner

__all__ = ["bench"]

#: what each round is beside
_DENSE = "bfloat16"
_HEADER = (
    "contender", "first token", "prefill", "decode, tokens/s", "× bfloat16", "per token", "of read rate",
    "cache", "peak memory",
)  # fmt: skip


def bench(
    model: str = typer.Argument(
        metavar="MODEL",
        help="The folder of a model, dense or quantized by ao, or ORG/NAME of the Hub.",
    ),
    recipe: list[str] = typer.Option(
        [], help="Measure the model quantized by this recipe; repeatable."
    ),
    kv: list[str] = typer.Option(
        [], help="Measure each with this recipe of caches, too; repeatable."
    ),
    prompt_lengths: str = typer.Option("64,1024", help="Tokens of the prompts."),
    new_tokens: int = typer.Option(64, min=2, help="Tokens that are generated."),
    batches: str = typer.Option("1", help="Prompts at once."),
    ragged: bool = typer.Option(
        False, "--ragged", help="Batches of prompts of different lengths, too."
    ),
    rounds: int = typer.Option(5, min=1, help="In each round all contenders take their turn."),
    device: str | None = typer.Option(
        None, help="cpu, cuda, … [default: the accelerator, if there is one]"
    ),
    dtype: str = typer.Option(_DENSE, help="Of activations: float32, bfloat16 or float16."),
    json: Path | None = typer.Option(
        None, help="Write the results there, with machine and versions."
    ),
    markdown: Path | None = typer.Option(None, help="Write the tables there."),
) -> None:
    """Time to first token, prefill and decoding, beside the dense model in bfloat16, which always runs.

    Medians over rounds, with the quarter and three quarters of them. Each contender is a process of
    its own, whose peak memory is shown. Bytes per token are weights and cache that are read for it, and
    the share is of the rate at which torch reads a large matrix in the same round.
    """
    from ao_hf.commands.quiet import quiet
    from ao_hf.commands.results import check_files, numbers, write_json

    check_files(json=json, markdown=markdown)
    lengths, sizes = numbers("--prompt-lengths", prompt_lengths), numbers("--batches", batches)
    with quiet():
        from ao_hf import generation
        from ao_hf.generation.caches import check_kv
        from ao_hf.generation.machine import about
        from ao_hf.generation.models import check_recipe, device_of, folder_of

        for name in kv:
            check_kv(name)
        folder = folder_of(model)
        for name in recipe:
            check_recipe(name, folder)
        place = str(device_of(device))
        workloads = [
            generation.Workload(length, new_tokens, size, uneven)
            for length in lengths
            for size in sizes
            for uneven in ([False, True] if ragged and size > 1 else [False])
        ]
        contenders = _contenders(folder, recipe, kv, place, dtype)
        with ExitStack() as stack:
            runners = _runners(contenders, stack)
            rows = generation.measure(
                runners, workloads, rounds=rounds, device=place, progress=sys.stderr.isatty()
            )
    tables = {str(w): [_cells(row) for row in rows if row.workload == w] for w in workloads}
    _show(tables, markdown)
    if json is not None:
        write_json(
            json, {"about": about(place), "model": model, "rows": [asdict(row) for row in rows]}
        )


def _contenders(
    folder: Path, recipes: Sequence[str], kvs: Sequence[str], device: str, dtype: str
) -> dict[str, dict[str, Any]]:
    """Name -> what its process loads; the dense model first."""
    from ao_hf.generation.models import is_quantized

    base = {
        "model": str(folder),
        "recipe": None,
        "kv": None,
        "device": device,
        "dtype": dtype,
        "dense": True,
    }
    models = {_DENSE: base | {"dtype": _DENSE}}
    if dtype != _DENSE:
        models[dtype] = base
    if is_quantized(folder):
        models[folder.name] = base | {"dense": False}
    models |= {recipe: base | {"recipe": recipe, "dense": False} for recipe in recipes}
    return {
        name if kv is None else f"{name}, {kv}": options | {"kv": kv}
        for name, options in models.items()
        for kv in (None, *kvs)
    }


def _runners(contenders: Mapping[str, Mapping[str, Any]], stack: ExitStack) -> dict[str, Runner]:
    """Start a process for each, which end with the stack."""
    from ao_hf.generation.worker import Worker

    return {
        name: stack.enter_context(Worker(name, options)) for name, options in contenders.items()
    }


def _cells(row: Measured) -> tuple[str, ...]:
    from ao_core.ext.reports import size_text

    decode = row.decode_rate
    peak = row.peak_resident if row.peak_allocated is None else row.peak_allocated
    return (
        row.contender,
        f"{row.first_seconds.median:.3f} s",
        f"{row.prefill_rate.median:.0f}/s",
        f"{decode.median:.1f} ({decode.low:.1f} to {decode.high:.1f})",
        f"{row.times_baseline.median:.2f}",
        size_text(int(row.bytes_per_token)),
        f"{row.share_of_read.median:.0%}",
        size_text(row.cache_bytes),
        size_text(peak),
    )


def _show(tables: Mapping[str, Sequence[Sequence[str]]], path: Path | None) -> None:
    from ao_core.ext.cli import show_table
    from ao_hf.commands.results import markdown

    for title, rows in tables.items():
        show_table(title, _HEADER, rows, right=range(1, len(_HEADER)))
    if path is not None:
        texts = [f"**{title}**\n\n{markdown(_HEADER, rows)}" for title, rows in tables.items()]
        path.write_text("\n".join(texts), encoding="utf-8")
