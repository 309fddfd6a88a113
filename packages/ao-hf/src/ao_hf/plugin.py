"""The records that ao-hf adds to the registry of ao-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core import FolderKind, hookimpl
from ao_hf import folders

if TYPE_CHECKING:
    import typer


@hookimpl
def ao_api() -> tuple[int, int]:
    """The version of ao-core's plugin API that this package was written for."""
    return (0, 1)


@hookimpl
def ao_folder_kinds() -> list[FolderKind]:
    """Folders of models of transformers and of diffusers, and of its pipelines."""
    return [folders.TRANSFORMERS, folders.DIFFUSERS, folders.PIPELINES]


@hookimpl
def ao_cli(app: typer.Typer) -> None:
    """`ao generate`, `ao bench`, `ao eval` and `ao recommend`."""
    from ao_hf.commands.bench import bench
    from ao_hf.commands.evaluate import evaluate
    from ao_hf.commands.generate import generate
    from ao_hf.commands.recommend import recommend

    app.command()(generate)
    app.command()(bench)
    app.command("eval")(evaluate)
    app.command()(recommend)
