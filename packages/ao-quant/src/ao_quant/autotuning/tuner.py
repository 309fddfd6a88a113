"""`autoquant`: time the whole model in every recipe, exchange what pays, take the fastest that is good."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ao_core import quantize_
from ao_core.ext import ConfigError, ConfigLike, check_quantizable, checked_but
from ao_core.ext.calibration import Data, Sample, batches_of, evaluating
from ao_core.ext.quantizing import FilterFn, Progress, decide, warn_caller, watched
from ao_quant.autotuning.cache import Cache, default_folder, machine
from ao_quant.autotuning.calls import record
from ao_quant.autotuning.exchange import exchanged
from ao_quant.autotuning.layers import Clock, Formats, timed
from ao_quant.autotuning.result import AutoquantReport, Exchange, Whole
from ao_quant.autotuning.whole import (
    MIXED,
    Bench,
    ModelUse,
    chosen,
    finalists,
    whole_models,
)
from ao_quant.planning.candidates import kept_anyway, resolve_candidates
from ao_quant.planning.judging import MOST, Judge, measure_of
from ao_quant.planning.uniform import Everywhere, everywhere, formats_of
from ao_quant.timing import Timer, stopwatch

__all__ = ["CANDIDATES", "OnePositionWarning", "autoquant"]

#: weight-only and dynamic recipes of 8 and 4 bits
CANDIDATES = (
    "int8_weight_only",
    "int8_dynamic_activation_int8_weight",
    "float8_weight_only",
    "int4_weight_only",
    "int4_weight_only/g32-asymmetric",
    "int8_dynamic_activation_int4_weight",
)


class OnePositionWarning(UserWarning):
    """What formats lose was measured on a single position of the answer, which may be an unusual one."""


@checked_but("data")
def autoquant(
    model: nn.Module,
    example_input: Sample,
    *,
    candidates: Sequence[ConfigLike] = CANDIDATES,
    data: Data | None = None,
    max_loss: float | None = None,
    min_speedup: float = 1.0,
    use: ModelUse | None = None,
    apply: bool = True,
    cache: bool | str | os.PathLike[str] = True,
    rounds: int = 30,
    compiled: bool | None = None,
    filter_fn: FilterFn | None = None,
    progress: Progress = None,
    timer: Timer = stopwatch,
) -> AutoquantReport:
    """Quantize a model in the formats with which it is fastest on this device, in place.

    The whole model is timed in interleaved rounds: dense, and in each candidate, as `quantize_` applies it
    and on output heads too. From the fastest whose answers are good enough, groups of layers are exchanged:
    first those that promise most when timed separately, and only what makes the whole model faster is kept.
    Dense, the fastest recipes and what has become of the best are timed again, with three times the rounds,
    before one is chosen. So no candidate for all layers, within the same limit, would have been faster.

    Args:
        model: any module, compiled ones too; it is put into evaluation mode for the measurements.
        example_input: a tensor, a tuple of arguments, or a mapping of them, as the model gets in use:
            what is fastest for one row need not be for a thousand.
        candidates: configurations or names of recipes. Dense always is one.
        data: batches, whose answers say what a format loses; None: the answer to the example does. Give some
            where the example is a step of decoding, since one position is not a sample.
        max_loss: what the answers may lose: in nats per position where they have `logits`, by default 0.05;
            else it is their squared error over the sum of their squares, by default 0.01, which is 20 dB.
        min_speedup: over dense; what is slower is not chosen.
        use: what is timed in place of the answer to the example, such as a step of decoding with fused ops
            and a cache: takes the model as it is to be timed and returns a context manager, whose value is
            called with no arguments. Only that call is timed. Its times are not kept on disk.
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
        What was timed of whole models, exchanges and layers, what was chosen, and the report of `quantize_`.

    Raises:
        ConfigError: a candidate or another argument cannot work.
        QuantizationError: weights with NaN or inf, or on the meta device, or the model answers so.

    Warns:
        OnePositionWarning: losses are those of a single position.
    """
    configs = resolve_candidates(candidates)
    _check(max_loss, min_speedup, rounds)
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
    found = [(entry, calls) for entry, calls in zip(planned, uses, strict=True) if calls]
    used = [entry for entry, _ in found]
    uniform = everywhere(inner, configs, used, filter_fn)
    formats, clock = Formats(), Clock(timer, rounds, compiled, Cache(_folder(cache)))
    batches, name = (
        ([example_input], "example_input")
        if data is None
        else (batches_of(data, "autoquant"), "data")
    )
    measure = measure_of(inner, batches[0], name)
    judge = Judge.of(inner, batches, measure=measure, name=name)
    limit = MOST[measure] if max_loss is None else max_loss
    if used:
        _warn_of_one_position(judge, limit, name)
    layers = []
    wholes: list[Whole] = []
    tried: list[Exchange] = []
    picked = 0
    with evaluating(inner):
        for entry, calls in watched(found, [e.fqn for e in used], progress, "autoquant"):
            asked = formats_of(entry.fqn, configs, uniform)
            layers.append(timed(entry, calls, asked, formats, clock))
        if layers:
            bench = Bench(model, used, example_input, judge, use, formats, clock, layers)
            wholes, final, tried = _wholes(bench, uniform, limit)
            wholes, picked = chosen(wholes, final, limit, min_speedup)
    device = used[0].tensor.device if used else torch.device("cpu")
    taken = wholes[picked].config if wholes else None
    picks = {} if taken is None else dict(taken.entries)
    layers = [
        replace(x, picked=[t.config for t in x.timings].index(picks.get(x.fqn))) for x in layers
    ]
    result = AutoquantReport(
        tuple(layers),
        tuple(kept),
        machine(device),
        tuple(wholes),
        picked,
        tuple(tried),
        measure,
        judge.positions,
        limit,
    )
    return replace(result, report=quantize_(inner, result.config)) if apply else result


def _wholes(
    bench: Bench, uniform: Sequence[Everywhere], max_loss: float
) -> tuple[list[Whole], list[int], list[Exchange]]:
    """Dense, each candidate for all layers and the best with layers exchanged; the finalists; exchanges."""
    models = whole_models(bench.layers, uniform)
    seconds = bench.seconds(models)
    wholes = [
        Whole(each.name, each.config if number else None, time, bench.loss(each))
        for number, (each, time) in enumerate(zip(models, seconds, strict=True))
    ]
    final = finalists(wholes, max_loss)
    best = min(final, key=lambda place: wholes[place].seconds)
    other, tried = exchanged(models[best], wholes[best].seconds, bench.layers, bench, max_loss)
    if other is not models[best]:
        taken = (each.loss for each in reversed(tried) if each.loss is not None and not each.reason)
        final.append(len(wholes))
        models.append(other)
        wholes.append(Whole(MIXED, other.config, 0.0, next(taken)))
    times = bench.longer().seconds([models[place] for place in final])
    for place, time in zip(final, times, strict=True):
        wholes[place] = replace(wholes[place], seconds=time)
    return wholes, final, tried


def _warn_of_one_position(judge: Judge, max_loss: float, name: str) -> None:
    """Say that the limit was held to one position, where there was no more and it could matter."""
    if judge.positions == 1 and max_loss < math.inf:
        warn_caller(
            f"{name} is answered with one position, and one is not a sample: a first token with "
            "unusual values can rule out every format, or let a bad one pass. Give data=, batches with more "
            "positions, or max_loss=math.inf where the time alone shall decide",
            OnePositionWarning,
        )


def _is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, was given to `torch.compile`."""
    return hasattr(model, "_orig_mod") or any(
        getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
    )


def _folder(cache: bool | str | os.PathLike[str]) -> Path | None:
    if isinstance(cache, bool):
        return default_folder() if cache else None
    return Path(cache)


def _check(max_loss: object, min_speedup: object, rounds: object) -> None:
    if max_loss is not None and (not isinstance(max_loss, (int, float)) or not max_loss >= 0):
        raise ConfigError(f"max_loss={max_loss!r}: use 0 or more; math.inf allows anything")
    if not isinstance(min_speedup, (int, float)) or not 1.0 <= min_speedup < math.inf:
        raise ConfigError(f"min_speedup={min_speedup!r}: give a factor from 1 on")
    if type(rounds) is not int or rounds < 1:
        raise ConfigError(f"rounds={rounds!r}: give a positive number")
