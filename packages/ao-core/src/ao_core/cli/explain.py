"""`ao explain`: which kernels would serve the weights of a checkpoint, or one weight in a format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ao_core.cli.output import JSON, show_json

if TYPE_CHECKING:
    import torch

    from ao_core.explanation import WeightExplanation
    from ao_core.tensor import QTensor

__all__ = ["explain"]


def explain(
    target: str = typer.Argument(
        "", help="A checkpoint, or a recipe as with --config.", show_default=False
    ),
    config: str = typer.Option("", help="A recipe, or a .json or .yaml file with a configuration."),
    set_: list[str] = typer.Option([], "--set", help="NAME=VALUE of the configuration."),
    shape: str = typer.Option("4096,4096", help="Of the weight: N,K (outputs, inputs)."),
    batch: list[int] = typer.Option([1, 32, 512], help="Rows of the activations."),
    dtype: str = typer.Option("bfloat16", help="Of the activations, where there is no checkpoint."),
    device: str = typer.Option("cpu", help="Where the matmul would run."),
    as_json: bool = JSON,
) -> None:
    """Show every candidate kernel, the one that serves, and why each other does not."""
    from ao_core.errors import ConfigError
    from ao_core.explanation import Explanation

    _check_device(device)
    if target and not config and not Path(target).exists():
        target, config = "", target
    if bool(target) == bool(config):
        raise ConfigError("give either a checkpoint, or --config with --shape")
    if target:
        weights = tuple(_of_checkpoint(Path(target), tuple(batch), device))
    else:
        weights = (_of_format(config, set_, shape, tuple(batch), dtype, device),)
    found = Explanation(weights)
    if as_json:
        show_json(found.to_dict())
    else:
        typer.echo(str(found))


def _of_checkpoint(path: Path, rows: tuple[int, ...], device: str) -> Iterator[WeightExplanation]:
    from ao_core.checkpoints.skeleton import is_embedding
    from ao_core.explanation import explain_weight
    from ao_core.tensor import QTensor
    from ao_core.tensor.saving import open_checkpoint

    opened = open_checkpoint(path)
    placed: dict[object, QTensor] = {}
    for entry in opened.entries.values():
        if entry.spec is None:
            continue
        # one tensor of each kind is read, because its layout is settled when it is on the device
        key = (entry.spec, entry.shape, entry.dtype)
        if key not in placed:
            tensor = opened.load(entry.fqn)
            assert isinstance(tensor, QTensor)
            placed[key] = _place(tensor, device)
        w = placed[key]
        names = (entry.fqn, *(name for name, owner in opened.ties.items() if owner == entry.fqn))
        ops = tuple(dict.fromkeys("embedding" if is_embedding(n) else "linear" for n in names))
        yield explain_weight(
            w.spec,
            w.stored_shape,
            w.dtype,
            device,
            fqn=names[0],
            tied=names[1:],
            ops=ops,
            rows=rows,
        )


def _of_format(
    config: str, settings: list[str], shape: str, rows: tuple[int, ...], dtype: str, device: str
) -> WeightExplanation:
    import torch
    from torch import nn

    from ao_core.cli.settings import load_config
    from ao_core.errors import ConfigError
    from ao_core.explanation import explain_weight
    from ao_core.records import Skip, Target
    from ao_core.registry import registry
    from ao_core.tensor import QTensor

    resolved = load_config(config, settings)
    n, k = _parse_shape(shape)
    logical = _parse_dtype(dtype)
    dense = torch.ones(n, k, dtype=logical)
    target = Target("weight", nn.Linear(k, n, bias=False, device="meta", dtype=logical), "weight")
    made = registry.transform_for(type(resolved)).apply(dense, resolved, target)
    if isinstance(made, Skip):
        raise ConfigError(f"{config} cannot hold a weight of shape {shape}: {made.reason}")
    if not isinstance(made, QTensor):
        raise ConfigError(
            f"{config} makes a {type(made).__name__}, which has no table of kernels to explain"
        )
    w = _place(made, device)
    return replace(explain_weight(w.spec, w.stored_shape, w.dtype, device, rows=rows), fqn=config)


def _place(tensor: QTensor, device: str) -> QTensor:
    """The tensor in the layout it would have on a device; canonical if that device is not here."""
    import torch

    from ao_core.tensor import QTensor, repack

    if device == "cpu":
        return repack(tensor)
    canonical = tensor.canonical()
    here = torch.get_device_module(device).is_available()
    if here:
        moved = canonical.to(device)
        assert isinstance(moved, QTensor)
        canonical = repack(moved)
    return canonical


def _check_device(device: str) -> None:
    import torch

    from ao_core.errors import ConfigError

    try:
        torch.get_device_module(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device}: torch knows no such type of device") from error


def _parse_shape(text: str) -> tuple[int, int]:
    from ao_core.errors import ConfigError

    parts = text.replace("x", ",").replace("×", ",").split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--shape {text}: give two positive numbers, outputs and inputs: 4096,4096"
        )
    return int(parts[0]), int(parts[1])


def _parse_dtype(text: str) -> torch.dtype:
    import torch

    from ao_core.errors import ConfigError

    names = ("float32", "bfloat16", "float16", "float64")
    if text not in names:
        raise ConfigError(f"--dtype {text}: use one of {', '.join(names)}")
    dtype: torch.dtype = getattr(torch, text)
    return dtype
