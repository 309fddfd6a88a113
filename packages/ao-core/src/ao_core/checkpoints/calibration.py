"""What a checkpoint needs to be calibrated: its model without weights, the data, and the memory it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ao_core.calibration.algorithms import unsolvable_reason
from ao_core.calibration.digest import digest
from ao_core.calibration.matrices import matrix_shape
from ao_core.calibration.needing import algorithm_of
from ao_core.calibration.samples import Sample
from ao_core.calibration.trace import containers
from ao_core.calibration.visit import ACTIVATION_BYTES
from ao_core.checkpoints.homes import Home, Step
from ao_core.checkpoints.job import SLACK, Calibration
from ao_core.errors import ConfigError
from ao_core.folder_records import FolderModel
from ao_core.records import Target
from ao_core.report import size_text
from ao_core.targets import Decision
from ao_core.tensor.saving import Checkpoint

__all__ = ["calibration_of", "check_rows", "rows_of", "transform_memory", "unit_names"]

#: matrices of the size of a Hessian that are there at a time: itself, and three while it is factored
_MATRICES = 4
#: further ones of statistics of pairs: these, and what is solved with them
_PAIRED = 2
#: and while a model is transformed
_TRANSFORMING = 6
#: bytes for each weight of a block that is solved for at once: values, gradients and what is learned
_LEARNED = 40
#: numbers that a block keeps for gradients, for each number of its inputs of one batch
_KEPT = 60


def calibration_of(
    known: FolderModel | str,
    checkpoint: Checkpoint,
    decisions: Sequence[Decision],
    steps: Sequence[Step],
    batches: Sequence[Sample],
) -> Calibration:
    """What is needed to run the model of a checkpoint block by block.

    Raises:
        ConfigError: the model is not known, or the files do not have its parameters one by one.
    """
    if isinstance(known, str):
        raise ConfigError(
            f"data: the model must be run, and it is not known: {known}; install the library that knows it "
            "(ao-hf for models of transformers), or load the model and call quantize_"
        )
    if known.fill_buffers is None:
        raise ConfigError(
            f"data: {known.title or 'the model'} cannot be run from its files; load it and call quantize_"
        )
    by_name = {name: step for step in steps for name in (step.fqn, *step.tied)}
    homes: dict[str, Home] = {}
    own: list[Decision] = []
    for entry in decisions:
        home = _home_of(entry, by_name)
        places: dict[tuple[int, str], Target] = {}
        for owner in entry.owners:
            places.setdefault((id(owner.module), owner.name), owner)
        entry = replace(entry, owners=tuple(places.values()))
        blank = nn.Parameter(
            torch.empty(home.shape, dtype=home.dtype, device="meta"),
            requires_grad=False,
        )
        for owner in entry.owners:
            owner.module._parameters[owner.name] = blank
        own.append(entry)
        homes[entry.fqn] = home
    missing = [
        name for name, p in known.model.named_parameters() if name not in known.names.values()
    ]
    if missing := [name for name in missing if name not in {o.fqn for e in own for o in e.owners}]:
        raise ConfigError(f"data: the files do not have {missing[0]}, so the model cannot be run")
    buffers = {n: f for f, n in known.names.items() if n in dict(known.model.named_buffers())}
    return Calibration(
        known.model,
        known.fill_buffers,
        tuple(batches),
        tuple(own),
        homes,
        buffers,
        digest(batches),
        *_memory(known.model, own, homes, batches),
    )


def _home_of(entry: Decision, by_name: Mapping[str, Step]) -> Home:
    """Where the files have a parameter.

    Raises:
        ConfigError: they do not have it, or not so that it is known how its parts are joined.
    """
    shape = tuple(entry.tensor.shape)
    steps = {by_name[o.fqn].fqn: by_name[o.fqn] for o in entry.owners if o.fqn in by_name}
    parts = tuple(steps.values())
    stored = [tuple(part.entry.shape) for part in parts]
    if len(parts) == 1 and (parts[0].entry.spec is not None or stored[0] == shape):
        return Home(parts, stored[0])
    formats = {(part.entry.dtype, str(part.entry.spec)) for part in parts}
    is_whole = all(part.place for part in parts) and sum(map(prod, stored)) == prod(shape)
    if parts and is_whole and len(formats) == 1:
        return Home(parts, shape)
    held = (
        f"as {len(steps)} tensors, which are not known to be its parts" if steps else "not at all"
    )
    if len(steps) == 1:
        held = f"as {stored[0]}, and the model as {shape}"
    raise ConfigError(f"data: the files have {entry.fqn} {held}; load the model and call quantize_")


def unit_names(model: nn.Module) -> list[str]:
    """Names of the modules that are brought to memory one at a time: children of the outermost containers."""
    names: list[str] = []
    for chain in containers(model):
        if not any(chain.fqn == name or chain.fqn.startswith(f"{name}.") for name in names):
            prefix = f"{chain.fqn}." if chain.fqn else ""
            names += [prefix + child for child in chain.container._modules]
    return names


def rows_of(batches: Sequence[Sample]) -> int:
    """Rows that a layer sees, as far as inputs tell: tokens, or vectors."""
    total = 0
    for batch in batches:
        leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = [
            t.numel() // (t.shape[-1] if t.is_floating_point() and t.dim() else 1) for t in tensors
        ]
        total += max(sizes, default=0)
    return total


def check_rows(calibration: Calibration, tokens: int) -> None:
    """Raise `ConfigError` where there are fewer tokens than columns of a weight that needs them."""
    widest = max(calibration.visited, key=lambda e: _columns(e), default=None)
    if widest is not None and _columns(widest) > tokens:
        raise ConfigError(
            f"data: {tokens} tokens are fewer than the {_columns(widest)} columns of {widest.fqn}: what is "
            f"seen of its inputs would be singular; give at least {_columns(widest)} tokens, better several "
            "times as many"
        )


def _columns(entry: Decision) -> int:
    return matrix_shape(tuple(entry.tensor.shape), entry.owners[0])[2]


def _memory(
    model: nn.Module,
    decisions: Sequence[Decision],
    homes: Mapping[str, Home],
    batches: Sequence[Sample],
) -> tuple[int, str]:
    """Bytes at most, and in words."""
    units = unit_names(model)
    blocks = Counter[str]()
    for entry in decisions:
        unit = next((u for u in units if entry.fqn.startswith(f"{u}.")), "")
        blocks[unit] += homes[entry.fqn].nbytes
    outside = blocks.pop("", 0)
    block = max(blocks.values(), default=0)
    needing = [
        e for e in decisions if (a := algorithm_of(e.config)) and not unsolvable_reason(e, a)
    ]
    hessian = max((8 * _columns(e) ** 2 for e in needing if _has_hessian(e)), default=0)
    rows = rows_of(batches)
    widths = Counter(_columns(entry) for entry in needing)
    width = widths.most_common(1)[0][0] if widths else 0
    size = max((homes[e.fqn].dtype.itemsize for e in needing), default=0)
    activations = min(rows * width * size, ACTIVATION_BYTES)
    paired = sum(8 * _columns(e) ** 2 for e in _most_paired(needing))
    matrices = _MATRICES * hessian + _PAIRED * paired
    learned, streams = 0, 1
    if any(a.solve_block is not None for e in needing if (a := algorithm_of(e.config))):
        batch = max((rows_of([each]) for each in batches), default=0)
        learned, streams = _LEARNED * block // max(size, 1) + _KEPT * batch * width * 4, 2
    elif paired:
        streams = 2
    # what the layers of a block returned is kept until the whole block is done
    outputs = Counter[str]()
    for entry in needing:
        unit = next((u for u in units if entry.fqn.startswith(f"{u}.")), "")
        outputs[unit] += rows * size * matrix_shape(tuple(entry.tensor.shape), entry.owners[0])[1]
    outputs.pop("", 0)
    computed = max(outputs.values(), default=0)
    activations = min(streams * activations + computed, ACTIVATION_BYTES)
    total = max(2 * block + matrices + activations + learned, outside + block + activations) + SLACK
    text = (
        f"at most {size_text(total)} beside what the process has: two blocks ({size_text(2 * block)}), "
        f"matrices of the size of the largest Hessian ({size_text(matrices)}), "
        f"activations of {rows} rows ({size_text(activations)}) and {size_text(SLACK)}; what is in no block "
        f"takes {size_text(outside)} before that"
    )
    if learned:
        text += f"; what is learned of a block takes {size_text(learned)}"
    return total, text


def transform_memory(calibration: Calibration) -> tuple[int, str]:
    """Bytes at most that transforming the model of a checkpoint takes, without mapped files; and in words."""
    weights = [entry for entry in calibration.decisions if entry.config is not None]
    largest = max((e.tensor.numel() for e in calibration.decisions), default=0)
    rows = [rows_of([batch]) for batch in calibration.batches]
    width = max((_columns(entry) for entry in weights), default=0)
    widest = max(
        (e.tensor.shape[0] for e in calibration.decisions if e.tensor.dim() > 1), default=0
    )
    # in float64: a tensor, what becomes of it, and what that is computed from
    tensor = 3 * 8 * largest
    matrices = _TRANSFORMING * 8 * width**2
    # of a proof, outputs before and after in float32; of a visit, the inputs of a block
    outputs = 3 * 4 * max(rows, default=0) * widest
    activations = max(outputs, min(2 * 4 * sum(rows) * width, ACTIVATION_BYTES))
    total = tensor + matrices + activations + SLACK
    return total, (
        f"at most {size_text(total)} more than the process has while the model is transformed, mapped files "
        f"not counted: the largest tensor in float64 ({size_text(tensor)}), matrices of the size of the "
        f"largest Hessian ({size_text(matrices)}), activations and outputs ({size_text(activations)}) and "
        f"{size_text(SLACK)}"
    )


def _most_paired(needing: Sequence[Decision]) -> list[Decision]:
    """The widest weight that needs statistics of pairs, if any does."""
    paired = [
        entry
        for entry in needing
        if (a := algorithm_of(entry.config)) and any(s.of_pairs for s in a.needs(entry.config))
    ]
    return [max(paired, key=_columns)] if paired else []


def _has_hessian(entry: Decision) -> bool:
    algorithm = algorithm_of(entry.config)
    return algorithm is not None and any(
        "hessian" in statistic.keys for statistic in algorithm.needs(entry.config)
    )
