"""`ao verify`: whether the files of a checkpoint are what was written."""

from __future__ import annotations

from pathlib import Path

import typer

from ao_core.cli.output import JSON, show_json, show_table

__all__ = ["verify"]


def verify(
    checkpoint: Path = typer.Argument(
        help="What ao quantize or save_model wrote; with ao-hf also ORG/NAME of the Hub."
    ),
    as_json: bool = JSON,
) -> None:
    """Recompute the hashes of a checkpoint; exit code 1 if a file is not what was written."""
    from ao_core.checkpoints import verify_checkpoint
    from ao_core.checkpoints.folders import find
    from ao_core.report.text import size_text

    found = verify_checkpoint(find(checkpoint))
    wrong = [file for file in found if file.problem]
    if as_json:
        show_json({"files": [file._asdict() for file in found], "ok": not wrong})
    else:
        show_table(
            f"{checkpoint}",
            ("file", "size", "by", "result"),
            [(f.name, size_text(f.nbytes), f.by, f.problem or "as written") for f in found],
            right=(1,),
        )
        typer.echo(f"{len(found) - len(wrong)} of {len(found)} files are as they were written")
    if wrong:
        raise typer.Exit(1)
