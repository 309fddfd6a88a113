"""`ao replay`: what `ao.lock.json` says was done, done again and compared."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

__all__ = ["replay"]


def replay(
    lock: Path = typer.Argument(help="An ao.lock.json, or a folder with one."),
    source: Path = typer.Argument(metavar="SRC", help="The original, as for ao quantize."),
    target: Path = typer.Argument(metavar="DST", help="The directory to write."),
    data: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="The calibration data, where there were some, as for ao quantize.",
    ),
) -> None:
    """Quantize as a lock says, and say whether the result has the same bytes.

    Ends with 0 where it has, and with 1 where something differs, of which the first is named: a tensor of SRC
    or the data, then nothing is written, or a tensor of DST.
    """
    from ao_core.checkpoints import replay_checkpoint
    from ao_core.checkpoints.folders import find
    from ao_core.cli.data import batches_of_option
    from ao_core.tensor.saving.lock import read_lock

    found = find(source)
    drawn = dict(read_lock(lock).options.get("data") or {})
    options = {name: drawn.get(name) for name in ("tokens", "window", "seed")}
    batches = None if data is None else batches_of_option(found, data, **options)
    result = replay_checkpoint(lock, found, target, data=batches, progress=sys.stderr.isatty())
    for line in result.notes:
        typer.echo(f"note: {line}", err=True)
    if result.first:
        typer.echo(f"differs: {result.first}")
        raise typer.Exit(1)
    typer.echo(f"the tensors in {target} have the bytes that {lock} says")
