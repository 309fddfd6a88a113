"""`autoquant`: time every candidate for every layer and for all, and take the fastest that is good enough."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import Config, config_to_dict, quantize_
from ao_core.ext import ConfigError, ConfigLike, UnsupportedOp, check_quantizable, checked
from ao_core.ext.calibration import Sample, evaluating, tensor_of
from ao_core.ext.numerics import error_sums, sqnr_of_sums
from ao_core.ext.quantizing import (
    Decision,
    FilterFn,
    Progress,
    convert,
    decide,
    warn_caller,
    watched,
)
from ao_quant.autotuning.cache import Cache, default_folder, machine
from ao_quant.autotuning.calls import Uses, bound, record
from ao_quant.autotuning.result import AutoquantReport, Layer, Timing, Whole
from ao_quant.autotuning.whole import compare, pick, whole_models
from ao_quant.planning.candidates import kept_anyway, resolve_candidates
from ao_quant.planning.text import config_text
from ao_quant.timing import Timer, Trial, measure, stopwatch

__all__ = ["CANDIDATES", "OneRowWarning", "autoquant"]

#: times that differ by less than this factor are a tie, which the smaller error decides: a layer alone is not
#: timed better than that
_TIE = 1.1
#: weight-only and dynamic recipes of 8 and 4 bits
CANDIDATES = (
    "int8_weight_only",
    "int8_dynamic_activation_int8_weight",
    "float8_weight_only",
    "int4_weight_only",
    "int4_weight_only/g32-asymmetric",
    "int8_dynamic_activation_int4_weight",
)


@checked
def autoquant(
    model: nn.Module,
    example_input: Sample,
    *,
    candidates: Sequence[ConfigLike] = CANDIDATES,
    min_sqnr: float = 30.0,
    min_output_sqnr: float | None = None,
    min_speedup: float = 1.03,
    apply: bool = True,
    cache: bool | str | os.PathLike[str] = True,
    rounds: int = 30,
    compiled: bool | None = None,
    filter_fn: FilterFn | None = None,
    progress: Progress = None,
    timer: Timer = stopwatch,
) -> AutoquantReport:
    """Quantize a model in the formats with which it is fastest on this device, in place.

    The model answers the example once, to see how each layer is called. Then each layer is timed with each
    candidate, in rounds of all candidates, for exactly those calls; layers that are called alike are timed
    once. Then versions of the whole model are timed in interleaved rounds: dense, each candidate for all
    layers that can have it, and the fastest format of each layer. The fastest version whose answer is good
    enough is applied, so no single candidate for all layers would have been faster.

    Args:
        model: any module, compiled ones too; it is put into evaluation mode for the measurements.
        example_input: a tensor, a tuple of arguments, or a mapping of them, as the model gets in use:
            what is fastest for one row need not be for a thousand.
        candidates: configurations or names of recipes. Dense always is one.
        min_sqnr: least signal to noise of a layer's output in dB, on the example, with this
            layer alone quantized. 8 bits have about 40, 4 bits about 20.
        min_output_sqnr: the same of the model's answer, for every choice; by default 10 dB less than
            `min_sqnr`, since errors of layers add up.
        min_speedup: over dense; a little above 1, because times are noisy.
        apply: False: measure and report only.
        cache: keep times on disk, and use those there: in the folder AO_CACHE or the user's cache
            folder, or in a folder of your own. They hold for a device, the number of threads, the
            versions of torch and ao, its kernels, and the shapes.
        rounds: that are counted; fewer where they take more than two seconds.
        compiled: time layers under `torch.compile`; by default where the model is compiled.
        filter_fn: as in `quantize_`.
        progress: True for a bar, or a function called with (done, total, name).
        timer: seconds of one run of a `Trial`, by default of the wall clock.

    Returns:
        What was timed of layers and of whole models, what was chosen, and the report of `quantize_`.

    Raises:
        ConfigError: a candidate or another argument cannot work.
        QuantizationError: weights with NaN or inf, or on the meta device, or the model answers so.

    Warns:
        OneRowWarning: the example gives layers one row of activations, so their error is that of one row.
    """
    configs = resolve_candidates(candidates)
    _check(min_sqnr, min_output_sqnr, min_speedup, rounds)
    floor = min_sqnr - 10.0 if min_output_sqnr is None else min_output_sqnr
    compiled = _is_compiled(model) if compiled is None else compiled
    inner: nn.Module = getattr(model, "_orig_mod", model)
    entries = decide(inner, configs[0], filter_fn)
    kept = [(entry.fqn, reason) for entry in entries if (reason := kept_anyway(entry))]
    planned = [entry for entry in entries if kept_anyway(entry) is None]
    for entry in planned:
        check_quantizable(entry.tensor, entry.fqn)
    uses = record(inner, example_input, planned)
    kept += [
        (e.fqn, "the example does not use it") for e, u in zip(planned, uses, strict=True) if not u
    ]
    found = [(entry, use) for entry, use in zip(planned, uses, strict=True) if use]
    task = _Task(configs, min_sqnr, min_speedup, rounds, compiled, timer, Cache(_folder(cache)), {})
    with evaluating(inner):
        layers = [
            _tuned(entry, use, task)
            for entry, use in watched(found, [e.fqn for e, _ in found], progress, "autoquant")
        ]
        wholes, picked = _whole(model, example_input, [e for e, _ in found], layers, task, floor)
    device = found[0][0].tensor.device if found else torch.device("cpu")
    result = AutoquantReport(tuple(layers), tuple(kept), machine(device), tuple(wholes), picked)
    _warn_of_one_row(result, min_sqnr)
    return replace(result, report=quantize_(inner, result.config)) if apply else result


def _whole(
    model: nn.Module,
    sample: Sample,
    entries: list[Decision],
    layers: list[Layer],
    task: _Task,
    floor: float,
) -> tuple[list[Whole], int]:
    """Whole models with their times and errors, and which is chosen."""
    if not layers:
        return [], 0
    models = whole_models(layers, task.configs)
    key = {
        "machine": machine(entries[0].tensor.device),
        "layers": [[list(layer.shape), list(layer.uses)] for layer in layers],
        "models": [[m.name, m.config and config_to_dict(m.config)] for m in models],
        "compiled": task.compiled,
    }
    stored = task.cache.read(key)
    known = stored if stored is not None and stored.keys() == {m.name for m in models} else None
    wholes = compare(model, sample, entries, models, task.timer, task.rounds, known)
    if known is None:
        task.cache.write(key, {each.name: each.seconds for each in wholes})
    return pick(wholes, floor, task.min_speedup)


class OneRowWarning(UserWarning):
    """The error of a format was measured on a single row of activations, which may be an unusual one."""


def _warn_of_one_row(result: AutoquantReport, min_sqnr: float) -> None:
    """Say that the floor was held to one row, where there was no more and it could matter."""
    if (names := result.one_row) and min_sqnr > -math.inf:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warn_caller(
            f"example_input gives {names[0]}{more} one row of activations, and one row is not a sample: a "
            "first token with unusual values can rule out every format by min_sqnr, or let a bad one pass. "
            "Give several rows to choose by, or min_sqnr=-math.inf where the time alone shall decide",
            OneRowWarning,
        )


@dataclass(frozen=True)
class _Task:
    """What holds for all layers."""

    configs: list[Config]
    min_sqnr: float
    min_speedup: float
    rounds: int
    compiled: bool
    timer: Timer
    cache: Cache
    #: times that this process knows, by key
    known: dict[str, dict[str, float]]


def _tuned(entry: Decision, uses: Uses, task: _Task) -> Layer:
    """One layer with its candidates compared."""
    tensor = entry.tensor
    timings, parameters = [Timing(None, None)], [tensor]
    refused = []
    answers = [tensor_of(bound(use, tensor)()) for use in uses]
    for config in task.configs:
        new, made = convert(replace(entry, config=config), tensor)
        if new is None:
            refused.append(Timing(config, None, None, made.reason))
            continue
        try:
            quality = _sqnr(answers, [tensor_of(bound(use, new)()) for use in uses])
        except UnsupportedOp as error:
            refused.append(Timing(config, None, None, str(error)))
            continue
        timings.append(Timing(config, None, quality))
        parameters.append(new)
    seconds, cached = _seconds(entry, uses, task, timings, parameters)
    timings = [replace(t, seconds=s) for t, s in zip(timings, seconds, strict=True)]
    timings = [replace(t, reason=_unfit(t, timings[0], task) or "") for t in timings]
    fitting = [i for i, timing in enumerate(timings) if not timing.reason]
    picked = _pick(fitting, seconds, timings)
    timings = [
        replace(t, reason=_passed(t, timings[picked])) if not t.reason and i != picked else t
        for i, t in enumerate(timings)
    ]
    return Layer(
        fqn=entry.fqn,
        shape=tuple(tensor.shape),
        uses=tuple(use.describe() for use in uses),
        timings=(*timings, *refused),
        picked=picked,
        reason=_why(picked, timings, task),
        cached=cached,
        tied=tuple(owner.fqn for owner in entry.owners[1:]),
        rows=sum(answer.numel() // max(answer.shape[-1], 1) for answer in answers),
    )


def _pick(fitting: list[int], seconds: list[float], timings: list[Timing]) -> int:
    """The fastest candidate; of those that are about as fast, the one with the least error."""
    fastest = min(fitting, key=lambda i: (seconds[i], i))
    if timings[fastest].config is None:
        return fastest
    tied = [i for i in fitting if timings[i].config and seconds[i] <= _TIE * seconds[fastest]]
    return max(tied, key=lambda i: (timings[i].sqnr_db or 0.0, -seconds[i]))


def _passed(timing: Timing, picked: Timing) -> str:
    """Why a candidate that could be chosen was not."""
    faster = (timing.seconds or 0.0) < (picked.seconds or 0.0)
    return "another is about as fast, with less error" if faster else "another is faster"


def _seconds(
    entry: Decision, uses: Uses, task: _Task, timings: list[Timing], parameters: list[Tensor]
) -> tuple[list[float], bool]:
    """The time of each candidate, and whether the disk knew it."""
    tensor = entry.tensor
    names = ["dense" if t.config is None else _compact(config_to_dict(t.config)) for t in timings]
    key = {
        "machine": machine(tensor.device),
        "weight": [list(tensor.shape), str(tensor.dtype)],
        "uses": [use.describe() for use in uses],
        "candidates": names,
        "compiled": task.compiled,
    }
    text = _compact(key)
    if text in task.known:
        return [task.known[text][name] for name in names], False
    stored = task.cache.read(key)
    if stored is not None and stored.keys() == set(names):
        return [stored[name] for name in names], True
    trials = [
        Trial(
            entry.fqn,
            config_text(timing.config),
            tuple((bound(use, new, compiled=task.compiled), use.count) for use in uses),
            tensor.device,
        )
        for timing, new in zip(timings, parameters, strict=True)
    ]
    seconds = measure(trials, task.timer, task.rounds)
    task.known[text] = dict(zip(names, seconds, strict=True))
    task.cache.write(key, task.known[text])
    return seconds, False


def _unfit(timing: Timing, dense: Timing, task: _Task) -> str | None:
    """Why a candidate cannot be chosen; None if it can, as dense always can."""
    if timing.config is None:
        return None
    assert timing.seconds is not None
    assert timing.sqnr_db is not None
    assert dense.seconds is not None
    if not timing.sqnr_db >= task.min_sqnr:
        return f"{timing.sqnr_db:.1f} dB are less than min_sqnr={task.min_sqnr:g}"
    if timing.seconds * task.min_speedup > dense.seconds:
        return f"{dense.seconds / timing.seconds:.2f}× dense is less than {task.min_speedup:g}×"
    return None


def _why(picked: int, timings: list[Timing], task: _Task) -> str:
    """Why one was chosen."""
    limit = timings[picked].seconds or 0.0
    worse = [t for t in timings if t.sqnr_db is not None and not t.sqnr_db >= task.min_sqnr]
    faster = sum((timing.seconds or 0.0) < limit for timing in worse)
    passed = f"; {faster} faster below {task.min_sqnr:g} dB" if faster else ""
    if picked:
        fitting = [t for t in timings if not t.reason or t.reason.startswith("another")]
        first = all((t.seconds or 0.0) >= limit for t in fitting)
        return (
            f"{'the fastest' if first else 'about as fast as the fastest, with less error'}{passed}"
        )
    return f"no other is {task.min_speedup:g}× as fast{passed}"


def _sqnr(answers: list[Tensor], others: list[Tensor]) -> float:
    """Signal to noise in dB of all answers together."""
    sums = torch.stack([error_sums(a, b) for a, b in zip(answers, others, strict=True)]).sum(0)
    return float(sqnr_of_sums(sums))


def _is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, was given to `torch.compile`."""
    return hasattr(model, "_orig_mod") or any(
        getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
    )


def _folder(cache: bool | str | os.PathLike[str]) -> Path | None:
    if isinstance(cache, bool):
        return default_folder() if cache else None
    return Path(cache)


def _compact(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _check(min_sqnr: object, floor: object, min_speedup: object, rounds: object) -> None:
    if not isinstance(min_sqnr, (int, float)) or math.isnan(min_sqnr):
        raise ConfigError(f"min_sqnr={min_sqnr!r}: give a number of dB; -math.inf allows anything")
    if floor is not None and (not isinstance(floor, (int, float)) or math.isnan(floor)):
        raise ConfigError(f"min_output_sqnr={floor!r}: give a number of dB, or None")
    if not isinstance(min_speedup, (int, float)) or not 1.0 <= min_speedup < math.inf:
        raise ConfigError(f"min_speedup={min_speedup!r}: give a factor from 1 on")
    if type(rounds) is not int or rounds < 1:
        raise ConfigError(f"rounds={rounds!r}: give a positive number")
