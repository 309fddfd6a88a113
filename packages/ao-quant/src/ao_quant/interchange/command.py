"""`ao convert` and `ao diff`: checkpoints of one project and another."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from ao_core.ext.cli import JSON, show_json

__all__ = ["convert", "diff"]


def convert(
    source: Path = typer.Argument(metavar="SRC", help="A folder, an index or a safetensors file."),
    target: Path | None = typer.Argument(
        None, metavar="DST", help="The folder to write, new or empty."
    ),
    to: str = typer.Option(
        ..., help='The format: "ao", or a name of docs/interchange.md, such as gptq.'
    ),
    source_format: str = typer.Option(
        "", "--from", metavar="FORMAT", help="That of SRC, where its tensors do not tell."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Tell what would become of each weight, and write nothing."
    ),
    max_shard_size: str = typer.Option("5GB", help="Split files above this size."),
    json: bool = JSON,
) -> None:
    """Convert a quantized checkpoint, weight by weight, and say what became of each.

    Ends with 0 where all values are equal, 3 where some were put on another grid, 4 where some weights were
    refused and stay dense. Called again after a kill, it goes on.
    """
    from ao_core.ext import ConfigError
    from ao_quant.interchange.convert import convert_checkpoint

    if target is None and not dry_run:
        raise ConfigError("DST is missing; give a folder, or --dry-run")
    result = convert_checkpoint(
        source,
        None if dry_run else target,
        to,
        source_format=source_format,
        max_shard_size=max_shard_size,
        progress=sys.stderr.isatty(),
    )
    show_json(result.to_dict()) if json else typer.echo(str(result))
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def diff(
    first: Path = typer.Argument(metavar="A", help="A folder, an index or a file, of any format."),
    second: Path = typer.Argument(metavar="B", help="Another one."),
    original: Path | None = typer.Option(
        None, metavar="O", help="What both were made of: say of each tensor which is nearer to it."
    ),
    json: bool = JSON,
) -> None:
    """Compare two checkpoints tensor by tensor: formats, bytes, and the SQNR between them.

    Ends with 0 where all values are equal, and with 1 where some are not.
    """
    from ao_quant.interchange.differences import diff_checkpoints

    result = diff_checkpoints(first, second, original=original, progress=sys.stderr.isatty())
    show_json(result.to_dict()) if json else typer.echo(str(result))
    if result.exit_code:
        raise typer.Exit(result.exit_code)
