"""`ao quantize`: a checkpoint in, a quantized checkpoint out, without the code of the model."""

from __future__ import annotations

from pathlib import Path

import typer

__all__ = ["quantize"]


def quantize(
    source: Path = typer.Argument(
        metavar="SRC", help="A safetensors file, or a directory in Hugging Face's layout."
    ),
    target: Path = typer.Argument(metavar="DST", help="The directory to write."),
    config: str = typer.Option(
        ..., help="A recipe (see ao formats), or a .json or .yaml file with a configuration."
    ),
    set_: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Set a field of the configuration; repeatable."
    ),
    include: list[str] = typer.Option(
        [],
        metavar="REGEX",
        help="Quantize the tensors whose name has a match, whatever they are, and no others.",
    ),
    exclude: list[str] = typer.Option(
        [], metavar="REGEX", help="Keep the tensors whose name has a match."
    ),
    report: Path | None = typer.Option(None, help="Also write the report, as .html or .json."),
    max_shard_size: str = typer.Option("5GB", help="Split files above this size."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Write into a directory with files."),
) -> None:
    """Quantize a checkpoint, tensor by tensor.

    Without --include, quantizes what quantize_ would: weights of linear layers and convolutions, of
    attention and of fused experts; norms and embeddings are kept.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

    from ao_core.cli.convert import check_paths, convert_checkpoint, write_report
    from ao_core.cli.settings import load_config

    check_paths(source, target, report, overwrite)
    resolved = load_config(config, set_)
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("opening", total=None)

        def advance(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name or f"writing {target}")

        result = convert_checkpoint(
            source, target, resolved, include, exclude, max_shard_size, advance
        )
    typer.echo(str(result))
    if report is not None:
        write_report(result, report, f"{source.name} as {config}")
    typer.echo(f"\nwritten to {target}")
