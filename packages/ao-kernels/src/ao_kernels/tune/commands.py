"""The commands of `python -m ao_kernels.tune`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ao_core.ext import ConfigError
from ao_core.ext.cli import JSON, make_group, show_json, show_table
from ao_kernels.triton.tuning import store

__all__ = ["tune"]

tune = make_group("python -m ao_kernels.tune", "Settings of GPU kernels that were measured here.")


@tune.command()
def show(as_json: bool = JSON) -> None:
    """List what the cache has: problems, the settings that serve them, and microseconds."""
    found = list(store.cached())
    if as_json:
        show_json(
            [
                {"device": device._asdict(), "versions": versions, **record.to_dict()}
                for device, versions, record in found
            ]
        )
    elif not found:
        typer.echo("nothing was measured here yet")
    else:
        header = ("device", "versions", "problem", "setting", "microseconds of those tried")
        show_table(
            "Measured settings",
            header,
            [
                (device.name, versions, record.problem, _words(record.setting), _times(record))
                for device, versions, record in found
            ],
        )


@tune.command()
def clear() -> None:
    """Drop all that was measured, of every device and version."""
    typer.echo(f"dropped {store.clear()} file(s)")


@tune.command()
def export(
    folder: Path = typer.Argument(help="Where the files are written, one a device."),
) -> None:
    """Write what this version of the kernels measured, in the form in which packages ship it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in store.exported().items():
        (folder / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        typer.echo(f"{folder / name}: {len(data['records'])} record(s)")


@tune.command()
def model(
    checkpoint: Path = typer.Argument(help="A checkpoint with quantized weights."),
    batch: list[int] = typer.Option([], help="Rows of the activations; repeatable."),
) -> None:
    """Measure the matmuls of a checkpoint's weights on the GPU, and keep what is found."""
    from ao_core import open_checkpoint
    from ao_kernels.triton.shared.device import unavailable
    from ao_kernels.triton.tuning.ahead import ROWS, tune_weights

    if reason := unavailable():
        raise ConfigError(f"there is nothing to tune: {reason}")
    opened = open_checkpoint(checkpoint)
    names = [entry.fqn for entry in opened.entries.values() if entry.spec is not None]
    found = tune_weights((opened.load(name, device="cuda") for name in names), batch or ROWS)
    show_table(
        "Settings",
        ("problem", "setting", "from"),
        [(each.problem, _words(each.setting or {}), each.source) for each in found],
    )


def _words(setting: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in setting.items())


def _times(record: store.Record) -> str:
    times = [f"{microseconds:.1f}" for _, microseconds in record.tried]
    return ", ".join(times + [f"{len(record.untried)} not tried"] * bool(record.untried))
