"""`ao.lock.json`: what is needed to reproduce a quantized checkpoint, and hashes of its tensors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_core.__about__ import __version__
from ao_core.dispatch import matmul_op, select
from ao_core.errors import CheckpointError, UnsupportedOp
from ao_core.records import Call
from ao_core.schema import ANY, COUNT, SHA256, TEXT, Fields, Items, SchemaError, Table
from ao_core.spec import Spec
from ao_core.tensor.relayout import best_spec
from ao_core.tensor.saving.checkpoint import Checkpoint
from ao_core.tensor.saving.files import read_json
from ao_core.tensor.saving.hashes import tensor_hashes

__all__ = [
    "LOCK",
    "Done",
    "Lock",
    "done_to",
    "forget",
    "kernels_of",
    "lock_of",
    "note",
    "read_lock",
    "text_of",
    "versions_of",
]

#: the name of the file
LOCK = "ao.lock.json"
_VERSION = 1
#: where a module keeps what was done to it
_NOTES = "_ao_done"
_FIELDS = Fields(
    {
        "version": COUNT,
        "versions": Table(TEXT),
        "steps": Items(
            Fields({"config": Table(ANY), "data": TEXT, "kernels": Table(Table(COUNT))})
        ),
        "seeds": Table(ANY),
        "options": Table(ANY),
        "source": Table(SHA256),
        "tensors": Table(SHA256),
    }
)


#: op -> name of a kernel -> how many weights it serves
Kernels = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Done:
    """One quantization that tensors went through."""

    #: in the form of `config_to_dict`
    config: Mapping[str, Any]
    #: a hash of the calibration inputs; empty: there were none
    data: str = ""
    #: that made the weights and serve them, on the machine that quantized
    kernels: Kernels = field(default_factory=dict)


@dataclass(frozen=True)
class Lock:
    """What `ao.lock.json` says."""

    #: of torch, ao-core, and the distributions that provide configurations, formats and layouts
    versions: Mapping[str, str]
    #: what was done, in order
    steps: tuple[Done, ...]
    #: by the path of a field in a configuration, or "data" for what was drawn of a file
    seeds: Mapping[str, Any]
    #: other arguments of `quantize_checkpoint`; empty: the model was quantized in memory
    options: Mapping[str, Any]
    #: SHA-256 of each tensor of the source, by name; empty: it was a model in memory
    source: Mapping[str, str]
    #: of each tensor of the result
    tensors: Mapping[str, str]


def note(model: nn.Module, done: Done) -> None:
    """Let a model remember what was done to it, for the lock that is written when it is saved."""
    model.__dict__[_NOTES] = (*model.__dict__.get(_NOTES, ()), done)


def forget(model: nn.Module) -> None:
    """Take all notes away, where nothing is quantized any more."""
    for module in model.modules():
        module.__dict__.pop(_NOTES, None)


def done_to(model: nn.Module) -> tuple[Done, ...]:
    """What was done to a model and to its modules."""
    return tuple(each for module in model.modules() for each in module.__dict__.get(_NOTES, ()))


def lock_of(
    checkpoint: Checkpoint,
    steps: Sequence[Done] = (),
    *,
    source: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    seeds: Mapping[str, Any] | None = None,
) -> Lock:
    """The lock of a checkpoint that was just written; reads all of it.

    Args:
        checkpoint: the result.
        steps: what was done to it.
        source: hashes of the tensors that it was made of, where there were files.
        options: of `quantize_checkpoint`.
        seeds: that are in no configuration.

    Raises:
        CheckpointError: it cannot be read.
    """
    dists = {provider.dist for provider in checkpoint.providers}
    found = dict(seeds or {})
    for number, step in enumerate(steps):
        dists |= set(_texts(step.config, "provider"))
        found |= {f"steps.{number}.{path}": seed for path, seed in _seeds(step.config)}
    return Lock(
        versions_of(dists),
        tuple(steps),
        found,
        dict(options or {}),
        dict(source or {}),
        tensor_hashes(checkpoint),
    )


def text_of(lock: Lock) -> str:
    """What stands in the file."""
    return json.dumps({"version": _VERSION, **asdict(lock)}, indent=1) + "\n"


def read_lock(path: Path) -> Lock:
    """The lock in a file, or in a folder.

    Raises:
        CheckpointError: there is none, or it is damaged or of a newer version.
    """
    file = path / LOCK if path.is_dir() else path
    try:
        data = read_json(file, _FIELDS, "lock")
    except SchemaError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if (version := data["version"]) != _VERSION:
        raise CheckpointError(f"{file}: is of version {version}, and {_VERSION} is read here")
    steps = tuple(Done(step["config"], step["data"], step["kernels"]) for step in data["steps"])
    names = ("seeds", "options", "source", "tensors")
    return Lock(data["versions"], steps, *(data[name] for name in names))


def kernels_of(
    weights: Iterable[tuple[Spec, tuple[int, ...], torch.dtype]], device: str = "cpu"
) -> Kernels:
    """The kernels that quantize weights and multiply one row by them on this machine, and how often.

    Args:
        weights: canonical formats, shapes and dtypes.
        device: its type.
    """
    found: dict[str, Counter[str]] = {}
    for spec, shape, dtype in weights:
        plain = replace(spec, input=(), act=None)
        calls = [Call("quantize", plain, shape, shape, dtype, device)]
        if (op := matmul_op(shape)) is not None:
            calls.append(Call(op, spec, shape, (1, shape[-1]), dtype, device))
        for call in calls:
            with suppress(UnsupportedOp):  # the weight was made in another way, or is only stored
                best = call if call.op == "quantize" else replace(call, spec=best_spec(call))
                found.setdefault(call.op, Counter())[select(best).name] += 1
    return {op: dict(sorted(names.items())) for op, names in sorted(found.items())}


def versions_of(dists: Iterable[str]) -> dict[str, str]:
    """The versions of torch, ao-core and other distributions here; empty where one is not installed."""
    found = {"torch": torch.__version__, "ao-core": __version__}
    for dist in sorted({*dists} - found.keys()):
        try:
            found[dist] = distributions.version(dist)
        except distributions.PackageNotFoundError:  # registered in the process
            found[dist] = ""
    return found


def _fields(value: Any, at: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, name, value) of all fields within a value."""
    inner = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    for key, each in inner:
        path = f"{at}.{key}" if at else str(key)
        yield path, str(key), each
        yield from _fields(each, path)


def _texts(config: Mapping[str, Any], name: str) -> Iterator[str]:
    return (value for _, key, value in _fields(config) if key == name and isinstance(value, str))


def _seeds(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for path, key, value in _fields(config):
        if (key == "seed" or key.endswith("_seed")) and isinstance(value, int):
            yield path, value
