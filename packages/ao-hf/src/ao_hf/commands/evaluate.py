"""`ao eval`: how far a quantized model, and a quantized cache, are from the original."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ao_hf.generation import Loaded, Quality, Variant

__all__ = ["evaluate", "text_of"]

_HEADER = ("model", "cache", "chunk", "perplexity", "KL, nats", "same token", "diverges after")


def evaluate(
    model: str = typer.Argument(
        metavar="MODEL",
        help="A folder, dense or quantized by ao, a GGUF file, or ORG/NAME of the Hub.",
    ),
    recipe: list[str] = typer.Option(
        [], help="Compare the original quantized by this recipe; repeatable."
    ),
    kv: list[str] = typer.Option([], help="Compare this recipe of caches, too; repeatable."),
    original: str | None = typer.Option(
        None, help="What a quantized MODEL was made of. [default: MODEL, which is dense then]"
    ),
    text: Path | None = typer.Option(None, help="A text file. [default: Python's documentation]"),
    chunks: str = typer.Option("1,64", help="Tokens that pass through the cache at once."),
    tokens: int = typer.Option(1024, help="Of text, in windows spread over it."),
    window: int = typer.Option(512, help="Tokens of a window."),
    tasks: str = typer.Option("", help="Tasks of lm-eval, with commas between them."),
    limit: int | None = typer.Option(None, min=1, help="Questions of each task. [default: all]"),
    device: str | None = typer.Option(
        None, help="cpu, cuda, … [default: the accelerator, if there is one]"
    ),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16 or float16."),
    json: Path | None = typer.Option(
        None, help="Write the results there, with machine and versions."
    ),
) -> None:
    """Perplexity, KL and agreement with the original, through the cache that text is generated with.

    The first rows are the original itself, in other chunks than it is compared with: what roundings
    of matmuls alone do.
    """
    from ao_core.ext import ConfigError
    from ao_hf.commands.quiet import quiet
    from ao_hf.commands.results import check_files, numbers, write_json

    check_files(json=json)
    sizes, words = numbers("--chunks", chunks), text_of("--text", text)
    with quiet():
        from ao_hf import generation
        from ao_hf.generation.caches import check_kv
        from ao_hf.generation.machine import about
        from ao_hf.generation.models import check_recipe, folder_of

        for name in kv:
            check_kv(name)
        folder = folder_of(model)
        source = folder_of(original or model)
        for name in recipe:
            check_recipe(name, source)
        get = partial(generation.load, device=device, dtype=dtype)
        dense = get(original or model)
        if dense.quantized and original is not None:
            raise ConfigError(f"--original {original}: is quantized itself")
        if dense.quantized:
            raise ConfigError(f"{model} is quantized: name what it was made of by --original")
        variants = _variants(dense, None if original is None else folder, recipe, kv, get)
        rows = generation.evaluate(
            dense,
            variants,
            generation.windows_of(dense.tokenizer, words, tokens, window),
            chunks=sizes,
            progress=sys.stderr.isatty(),
        )
        _show(f"{model}, beside {dense.name}", rows)
        scores = {}
        if names := [name.strip() for name in tasks.split(",") if name.strip()]:
            models = {variant.name: variant for variant in variants}
            scores = {
                n: generation.score_tasks(v.load(), names, limit=limit) for n, v in models.items()
            }
            _show_tasks(scores)
    if json is not None:
        found: dict[str, Any] = {
            "about": about(dense.model.device),
            "model": model,
            "original": original or model,
            "text": "pydoc_data.topics" if text is None else str(text),
            "rows": [asdict(row) for row in rows],
            "tasks": scores,
        }
        write_json(json, found)


def text_of(option: str, path: Path | None) -> str:
    """The text of a file, the value of an option; without one, the documentation of Python.

    Raises:
        ConfigError: it cannot be read.
    """
    from ao_core.ext import ConfigError
    from ao_hf.generation import default_text

    if path is None:
        return default_text()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: cannot be read as UTF-8: {error}") from error


def _variants(
    dense: Loaded, folder: Path | None, recipes: Sequence[str], kvs: Sequence[str], get: Any
) -> list[Variant]:
    """The original, a folder that was made of it, and what recipes make of it, each with all caches."""
    from ao_hf.generation import Variant

    loads = {dense.name: lambda: dense}
    if folder is not None:
        loads[folder.name] = partial(get, folder)
    loads |= {recipe: partial(get, dense.folder, recipe) for recipe in recipes}
    return [Variant(name, load, kv) for name, load in loads.items() for kv in (None, *kvs)]


def _show(title: str, rows: Sequence[Quality]) -> None:
    from ao_core.ext.cli import show_table

    cells = [
        (
            row.name,
            row.kv or "exact",
            str(row.chunk),
            f"{row.perplexity:.3f}",
            f"{row.kl_nats:.5f} ± {row.kl_error:.5f}",
            f"{row.agreement:.3f}",
            f"{row.diverges_after} tokens" if row.diverges_after < row.greedy_tokens else "never",
        )
        for row in rows
    ]
    show_table(title, _HEADER, cells, right=(2, 3, 4, 5, 6))
    typer.echo(
        f"{rows[0].tokens} predicted tokens; greedy continuations of {rows[0].greedy_tokens} tokens, the "
        "median of all windows"
    )


def _show_tasks(scores: dict[str, dict[str, dict[str, float]]]) -> None:
    from ao_core.ext.cli import show_table

    rows = [
        (name, task, metric, f"{value:.4f}")
        for name, tasks in scores.items()
        for task, metrics in tasks.items()
        for metric, value in metrics.items()
    ]
    show_table(
        "tasks of lm-eval, with exact caches",
        ("model", "task", "metric", "value"),
        rows,
        right=(3,),
    )
