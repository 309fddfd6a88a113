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
    "contender", "first token", "prefill", "decode, tokens/s", "× {first}", "per token", "of read rate",
    "cache", "peak memory",
)  # fmt: skip


def bench(
    model: str | None = typer.Argument(
        None,
        metavar="[MODEL]",
        help="A folder, dense or quantized by ao, a GGUF file, or ORG/NAME of the Hub.",
        show_default=False,
    ),
    preset: str | None = typer.Option(
        None, help="In place of MODEL, the shape of a known one with random weights: llama-3-8b."
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
    from ao_core.ext import ConfigError
    from ao_hf.commands.quiet import quiet
    from ao_hf.commands.results import check_files, numbers, write_json

    if (model is None) == (preset is None):
        raise ConfigError("give either MODEL or --preset")
    check_files(json=json, markdown=markdown)
    lengths, sizes = numbers("--prompt-lengths", prompt_lengths), numbers("--batches", batches)
    with quiet():
        from ao_core.ext.reports import size_text
        from ao_hf import generation
        from ao_hf.generation.caches import check_kv
        from ao_hf.generation.machine import about
        from ao_hf.generation.models import check_recipe, device_of, folder_of

        for name in kv:
            check_kv(name)
        place = str(device_of(device))
        workloads = [
            generation.Workload(length, new_tokens, size, uneven)
            for length in lengths
            for size in sizes
            for uneven in ([False, True] if ragged and size > 1 else [False])
        ]
        if model is None:
            contenders = _of_preset(str(preset), recipe, kv, place, dtype)
        else:
            folder = folder_of(model)
            for name in recipe:
                check_recipe(name, folder)
            contenders = _contenders(folder, recipe, kv, place, dtype)
        fitting, others = _split(contenders, place)
        with ExitStack() as stack:
            runners = _runners(fitting, stack)
            rows = generation.measure(
                runners, workloads, rounds=rounds, device=place, progress=sys.stderr.isatty()
            )
    tables = {str(w): [_cells(row) for row in rows if row.workload == w] for w in workloads}
    _show(tables, next(iter(fitting)), markdown)
    for name, size in others.items():
        typer.echo(
            f"not measured: {name}: its weights alone take {size_text(size)} (computed), which do not fit"
        )
    if json is not None:
        write_json(
            json,
            {
                "about": about(place),
                "model": model or preset,
                "rows": [asdict(row) for row in rows],
                "not_measured": others,
            },
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


def _of_preset(
    preset: str, recipes: Sequence[str], kvs: Sequence[str], device: str, dtype: str
) -> dict[str, dict[str, Any]]:
    """The same for a shape with random weights."""
    from ao_core import resolve_config
    from ao_hf.generation.presets import find_preset

    find_preset(preset)
    for recipe in recipes:
        resolve_config(recipe)
    base = {
        "model": preset,
        "recipe": None,
        "kv": None,
        "device": device,
        "dtype": dtype,
        "preset": True,
    }
    models = {_DENSE: base | {"dtype": _DENSE}} | {r: base | {"recipe": r} for r in recipes}
    return {
        name if kv is None else f"{name}, {kv}": options | {"kv": kv}
        for name, options in models.items()
        for kv in (None, *kvs)
    }


def _split(
    contenders: Mapping[str, dict[str, Any]], device: str
) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Contenders that fit into the memory that is free, and the bytes of the weights of the others.

    Only shapes are known before they are loaded. A tenth is left for what is computed.

    Raises:
        ConfigError: none fits.
    """
    from ao_core.ext import ConfigError
    from ao_core.ext.reports import size_text
    from ao_hf.generation.presets import free_memory, stored_bytes

    left, fitting, others = 0.9 * free_memory(device), {}, {}
    for name, options in contenders.items():
        size = 0
        if options.get("preset"):
            size = stored_bytes(options["model"], options["recipe"], options["dtype"])
        if size > left:
            others[name] = size
        else:
            left -= size
            fitting[name] = options
    if not fitting:
        needed = ", ".join(f"{name} {size_text(size)}" for name, size in others.items())
        raise ConfigError(
            f"--preset: nothing fits into {size_text(int(left))} of free memory: {needed}"
        )
    return fitting, others


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


def _show(tables: Mapping[str, Sequence[Sequence[str]]], first: str, path: Path | None) -> None:
    from ao_core.ext.cli import show_table
    from ao_hf.commands.results import markdown

    header = [name.format(first=first) for name in _HEADER]
    for title, rows in tables.items():
        show_table(title, header, rows, right=range(1, len(header)))
    if path is not None:
        texts = [f"**{title}**\n\n{markdown(header, rows)}" for title, rows in tables.items()]
        path.write_text("\n".join(texts), encoding="utf-8")
