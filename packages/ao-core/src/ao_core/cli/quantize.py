"""`ao quantize`: a checkpoint in, a quantized checkpoint out, without the code of the model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ao_core.report import Report

__all__ = ["quantize"]


def quantize(
    source: Path = typer.Argument(
        metavar="SRC",
        help="A safetensors file, a directory in Hugging Face's layout, or (with ao-hf) ORG/NAME of the Hub.",
    ),
    target: Path = typer.Argument(metavar="DST", help="The directory to write."),
    config: str = typer.Option(
        ..., help="A recipe (see ao formats), or a .json or .yaml file with a configuration."
    ),
    set_: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Set a field of the configuration; repeatable."
    ),
    data: Path | None = typer.Option(
        None,
        metavar="FILE",
        help='Calibration data, for configurations that need some: a text, or a .jsonl file with "text", '
        '"messages" or "input_ids" in each line.',
    ),
    tokens: int | None = typer.Option(
        None, help="Tokens of the data to use; 32768, or all where there are fewer, if not given."
    ),
    window: int | None = typer.Option(
        None, help="Tokens of one input of the model; 2048 if not given."
    ),
    seed: int | None = typer.Option(
        None, help="Chooses the windows that are used; 0 if not given."
    ),
    include: list[str] = typer.Option(
        [],
        metavar="REGEX",
        help="Quantize the tensors whose name has a match, whatever they are, and no others.",
    ),
    exclude: list[str] = typer.Option(
        [], metavar="REGEX", help="Keep the tensors whose name has a match."
    ),
    plan: bool = typer.Option(
        False, "--plan", help="Print what would be done, with all sizes, and write nothing."
    ),
    report: Path | None = typer.Option(None, help="Write the report there too, as .html or .json."),
    max_shard_size: str = typer.Option("5GB", help="Split files above this size."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Write into a directory with files."),
) -> None:
    """Quantize a checkpoint, tensor by tensor; called again after a kill, it goes on.

    Without --include, quantizes what quantize_ would: weights of linear layers and convolutions, of
    attention and of fused experts; norms and embeddings are kept.
    """
    from ao_core.checkpoints.calibration import check_rows, rows_of
    from ao_core.checkpoints.decide import make_job
    from ao_core.checkpoints.files import WORK, check_empty, check_target
    from ao_core.checkpoints.folders import find, hints
    from ao_core.checkpoints.plan import plan_of
    from ao_core.checkpoints.run import run
    from ao_core.cli.data import batches_of_option, drawn
    from ao_core.cli.settings import load_configs

    if report is not None:
        _check_report(report)
    found = find(source)
    chosen = load_configs(config, set_)
    batches = batches_of_option(found, data, tokens=tokens, window=window, seed=seed)
    job = make_job(
        found,
        chosen,
        data=batches,
        include=include,
        exclude=exclude,
        max_shard_size=max_shard_size,
    )
    if job.calibration is not None and batches is not None:
        check_rows(job.calibration, rows_of(batches))
    if data is not None:
        job = replace(job, drawn=drawn(data, tokens=tokens, window=window, seed=seed))
    check_target(found, target)
    if plan:
        if not overwrite and not (target / WORK).exists():
            check_empty(target)
        typer.echo(str(plan_of(job)))
        return
    typer.echo(f"memory: {job.memory_text()}", err=True)
    typer.echo(f"modules: {job.modules}", err=True)
    title = f"{source.name} as {config}"
    result = run(job, target, overwrite=overwrite, progress=sys.stderr.isatty(), title=title)
    typer.echo(str(result))
    if report is not None:
        report.write_text(_render(result, report, title), encoding="utf-8")
    typer.echo(f"\nwritten to {target}")
    for line in hints(target):
        typer.echo(line)


def _check_report(path: Path) -> None:
    """Raise before any work is done if the report could not be written."""
    from ao_core.errors import ConfigError
    from ao_core.report import Report

    _render(Report({}), path, "")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--report {path}: there is no directory {path.parent}")


def _render(report: Report, path: Path, title: str) -> str:
    """A report in the form that the file's name asks for."""
    from ao_core.errors import ConfigError

    if path.suffix == ".html":
        return report.to_html(title)
    if path.suffix == ".json":
        return report.to_json()
    raise ConfigError(f"--report {path}: the name must end in .html or .json")
