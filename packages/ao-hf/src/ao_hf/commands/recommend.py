"""`ao recommend`: recipes for a language model compared, and the configuration of the one to take."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ao_hf.generation import Loaded

__all__ = ["recommend"]

#: tokens of the prompt and of the text that are generated to measure decoding
_PROMPT, _NEW = 64, 17


def recommend(
    model: str = typer.Argument(
        metavar="MODEL", help="The folder of a dense model, a GGUF file, or ORG/NAME of the Hub."
    ),
    budget: str | None = typer.Option(
        None, help="Bytes of all weights, such as 100MB: take what loses least within that."
    ),
    max_loss: float | None = typer.Option(
        None,
        help="Without --budget: take the fastest that loses at most so many nats. [default: 0.05]",
    ),
    recipe: list[str] = typer.Option(
        [], help="Compare this recipe; repeatable. [default: eight from 8 to 4 bits]"
    ),
    data: Path | None = typer.Option(
        None, metavar="FILE", help="A text file. [default: Python's documentation]"
    ),
    tokens: int = typer.Option(2048, help="Of text, in windows spread over it."),
    window: int = typer.Option(512, help="Tokens of a window."),
    rounds: int = typer.Option(
        3, min=1, help="In each round a model and the dense one take turns."
    ),
    device: str | None = typer.Option(
        None, help="cpu, cuda, … [default: the accelerator, if there is one]"
    ),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16 or float16."),
    out: Path | None = typer.Option(
        None, help="Write the configuration there, for `ao quantize --config` and `AoConfig`."
    ),
    json: Path | None = typer.Option(None, help="Write all rows there, with machine and versions."),
) -> None:
    """Try recipes on a model, and say which one to take: size, KL, agreement and speed of decoding.

    Each is compared with the dense model, in turn. KL and agreement are those of the next token, in a text.
    """
    from ao_hf.commands.quiet import quiet
    from ao_hf.commands.results import check_files, write_json

    check_files(out=out, json=json)
    with quiet():
        from ao_core.ext import ConfigError, MissingExtraError
        from ao_hf import generation
        from ao_hf.commands.evaluate import text_of
        from ao_hf.generation.machine import about

        try:
            compared = import_module("ao_quant.recommending")
        except ModuleNotFoundError as error:
            raise MissingExtraError("ao_quant", "ao-quant", "ao recommend") from error
        words = text_of("--data", data)
        dense = generation.load(model, device=device, dtype=dtype)
        if dense.quantized:
            raise ConfigError(f"{model} is quantized: give the dense model that it was made of")
        windows = generation.windows_of(dense.tokenizer, words, tokens, window)
        found = compared.recommend(
            dense.model,
            [
                {"input_ids": each[None].to(dense.model.device), "use_cache": False}
                for each in windows
            ],
            budget=budget,
            max_loss=max_loss,
            candidates=recipe or compared.CANDIDATES,
            timer=partial(_seconds_per_token, dense),
            unit="token",
            rounds=rounds,
            progress=sys.stderr.isatty(),
        )
    typer.echo(str(found))
    if json is not None:
        write_json(json, {"about": about(dense.model.device), "model": model, **found.to_dict()})
    if out is not None:
        found.save(out)
        typer.echo(f"\nwritten to {out}: ao quantize {model} DST --config {out}")


def _seconds_per_token(dense: Loaded, model: Any) -> float:
    """Of decoding a short text by one prompt."""
    from ao_hf.generation import Workload, runner_of

    workload = Workload(_PROMPT, _NEW)
    return runner_of(replace(dense, model=model))(workload).decode / (_NEW - 1)
