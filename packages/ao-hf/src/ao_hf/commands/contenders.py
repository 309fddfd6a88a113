"""What `ao bench` compares: names of contenders, what each loads, and which of them fit into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ao_hf.generation.presets import Preset

__all__ = [
    "DENSE",
    "Missing",
    "Plan",
    "named_preset",
    "of_folder",
    "of_preset",
    "planned",
    "started",
]

#: the contender that all are compared with
DENSE = "bfloat16"
#: name -> arguments of `ao_hf.generation.worker.contender`
Contenders = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Missing:
    """A contender that does not fit into memory with a workload; sizes are computed.

    Attributes:
        contender: its name.
        workload: that is not run.
        weights_bytes: of all weights.
        cache_bytes: of keys and values at the end; None for a model without.
    """

    contender: str
    workload: Any
    weights_bytes: int
    cache_bytes: int | None


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        loaded: contenders whose weights fit, all at once.
        runs: workload -> their names.
        missing: what is not run.
    """

    loaded: Contenders
    runs: Mapping[Any, Sequence[str]]
    missing: Sequence[Missing]


def named_preset(model: str) -> Preset | None:
    """The shape of that name; None where it can be a folder, or a model of the Hub.

    Raises:
        UnknownNameError: it can be none of these.
    """
    from ao_core.ext import UnknownNameError
    from ao_hf.generation.presets import table

    if Path(model).exists() or "/" in Path(model).as_posix():
        return None
    if model not in table.PRESETS:
        raise UnknownNameError("folder or shape", model, table.PRESETS)
    return table.PRESETS[model]


def of_folder(
    folder: Path, recipes: Sequence[str], kvs: Sequence[str], device: str, dtype: str
) -> Contenders:
    """The dense model comes first."""
    from ao_hf.generation.models import is_quantized

    base = {"model": str(folder), "recipe": None, "device": device, "dtype": dtype, "dense": True}
    models = {DENSE: base | {"dtype": DENSE}}
    if dtype != DENSE:
        models[dtype] = base
    if is_quantized(folder):
        models[folder.name] = base | {"dense": False}
    models |= {recipe: base | {"recipe": recipe, "dense": False} for recipe in recipes}
    return _with_caches(models, kvs)


def of_preset(
    name: str, recipes: Sequence[str], kvs: Sequence[str], device: str, dtype: str
) -> Contenders:
    """The same for a shape with random weights."""
    from ao_core import resolve_config

    for recipe in recipes:
        resolve_config(recipe)
    base = {"model": name, "recipe": None, "device": device, "dtype": dtype, "preset": True}
    models = {DENSE: base | {"dtype": DENSE}} | {r: base | {"recipe": r} for r in recipes}
    return _with_caches(models, kvs)


def _with_caches(models: Contenders, kvs: Sequence[str]) -> Contenders:
    return {
        name if kv is None else f"{name}, {kv}": {**options, "kv": kv}
        for name, options in models.items()
        for kv in (None, *kvs)
    }


def planned(contenders: Contenders, workloads: Sequence[Any], device: str) -> Plan:
    """What fits into the memory that is free now.

    Sizes of shapes are known before they are loaded, those of folders are not. All models are in memory at
    once, and a cache while it is used. A tenth is left for what is computed.
    """
    from ao_hf.generation.machine import free_memory

    left = 0.9 * free_memory(device)
    weights = {name: _weights_of(options) for name, options in contenders.items()}
    caches = {(name, w): _cache_of(x, w) for name, x in contenders.items() for w in workloads}
    chosen = set()
    for name in sorted(contenders, key=weights.__getitem__):  # as many as possible
        if weights[name] + min(caches[name, w] for w in workloads) <= left:
            chosen.add(name)
            left -= weights[name]
    loaded = {name: options for name, options in contenders.items() if name in chosen}
    runs = {w: [name for name in loaded if caches[name, w] <= left] for w in workloads}
    missing = [
        Missing(name, w, weights[name], caches[name, w] or None)
        for w in workloads
        for name in contenders
        if name not in runs[w]
    ]
    return Plan(loaded, runs, missing)


def _weights_of(options: Mapping[str, Any]) -> int:
    """Bytes of the weights of a shape; 0 of a folder."""
    from ao_hf.generation.presets import stored_bytes

    if not options.get("preset"):
        return 0
    return stored_bytes(options["model"], options["recipe"], options["dtype"])


def _cache_of(options: Mapping[str, Any], workload: Any) -> int:
    """Bytes of keys and values at the end of a workload; 0 of a folder and of a forward pass."""
    from ao_hf.generation import Workload
    from ao_hf.generation.presets import cache_bytes_of

    if not options.get("preset") or not isinstance(workload, Workload):
        return 0
    return cache_bytes_of(
        options["model"], options["kv"], workload.batch, workload.tokens, options["dtype"]
    )


def started(contenders: Contenders, stack: ExitStack) -> dict[str, Any]:
    """Start a process for each, which end with the stack."""
    from ao_hf.generation.worker import Worker

    return {
        name: stack.enter_context(Worker(name, options)) for name, options in contenders.items()
    }
