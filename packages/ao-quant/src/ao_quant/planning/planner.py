"""`plan`: measure every parameter in every candidate format, and choose for the least total error."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from torch import nn

from ao_core.ext import ConfigError, ConfigLike, check_quantizable, checked_but, is_converted, shown
from ao_core.ext.calibration import Data, Sample, batches_of
from ao_core.ext.quantizing import FilterFn, Progress, watched
from ao_core.ext.quantizing import decide as decide
from ao_core.ext.saving import owners_of
from ao_quant.planning.calibrated import gathered
from ao_quant.planning.candidates import kept_anyway, resolve_candidates
from ao_quant.planning.choose import Needs, chosen
from ao_quant.planning.gradients import gradients_of
from ao_quant.planning.judging import Judge, Whole, measure_of
from ao_quant.planning.measure import MEASURES
from ao_quant.planning.options import Maker, error_by, options_of
from ao_quant.planning.result import Kept, QuantizationPlan
from ao_quant.planning.sizes import Files, budget_bytes
from ao_quant.planning.speed import Clock, Speeds, first_token
from ao_quant.planning.uniform import everywhere, formats_of

__all__ = ["CANDIDATES", "plan"]

#: recipes from 8 to 2 bits
CANDIDATES = (
    "int8_weight_only",
    "intx_weight_only",
    "int4_weight_only/g32-asymmetric",
    "int4_weight_only",
    "intx_weight_only/3bit",
    "intx_weight_only/2bit",
)


@checked_but("data", "timed")
def plan(
    model: nn.Module,
    *,
    budget: int | str | None = None,
    bits: float | None = None,
    max_kl: float | None = None,
    tokens_per_second: float | None = None,
    candidates: Sequence[ConfigLike] = CANDIDATES,
    sample: Sample | None = None,
    data: Data | None = None,
    measure: str | None = None,
    timed: Sample | None = None,
    filter_fn: FilterFn | None = None,
    progress: Progress = None,
) -> QuantizationPlan:
    """The best format for each weight within a budget, as a configuration for `quantize_`.

    What the model loses with each weight in each candidate format is predicted, or measured, for each alone;
    losses are added up, and the choice of least sum within the budget is found exactly. If there is data or a
    sample, each candidate that fits is also measured on all weights, as `quantize_` applies it and with
    output heads, and is taken if it is better than the plan. Give exactly one of `budget`, `bits`, `max_kl`
    and `tokens_per_second`. The model is not changed.

    Args:
        model: any module; what `quantize_` would quantize is planned, the rest is kept.
        budget: bytes that the files of weights of `save_model` may have, with their index, as a number or
            "1.2GB".
        bits: mean bits per planned weight, scales and zero points included.
        max_kl: in bits per position; the smallest files are found for which the whole plan, measured
            on the data or the sample, diverges no more than that from the model.
        tokens_per_second: the least error in a model that answers one token, with no context, at least so
            often a second on the device where it is. The model is timed dense, with each candidate, and with
            plans until one is fast enough.
        candidates: configurations or names of recipes, also those that need data. To leave a weight as it
            is always is one.
        sample: one input of the model: a tensor, a tuple of arguments, or a mapping of them. The model
            answers it with each weight in each candidate, which is exact and slow. Without `data` only.
        data: batches as for `quantize_`, which needs them again for candidates that need data. The errors
            "output" and "kl" are predicted from gradients of the answers, a backward pass for each batch and
            four at least, and corrected by some runs of the model. The gradients take 8 bytes per planned
            weight, and all candidates are held at once.
        measure: "kl": the divergence of the answers as logits over the last dimension; "output": noise over
            signal of the answers; the default is "kl" where the answer has `logits`, else "output". "layer":
            the same of the outputs of each layer on the data; "weight": of a weight's values, which needs no
            data but has to be asked for, since it does not tell what the model loses.
        timed: for `tokens_per_second`, an input whose answer counts as one token; by default the first token
            of the first batch.
        filter_fn: as in `quantize_`: (module, its name) -> whether its weights are planned, for
            instance to plan embeddings too.
        progress: True for a bar, or a function called with (done, total, name).

    Raises:
        ConfigError: the budget cannot be met (says the smallest that can), is not positive, or
            arguments contradict each other; there is neither data, a sample nor measure="weight"; or the
            model is quantized already.
        QuantizationError: weights with NaN or inf, or on the meta device.
        MissingExtraError: scipy is not installed (extra "plan").
    """
    goal, limit = _goal(budget, bits, max_kl, tokens_per_second)
    if timed is not None and goal != "tokens_per_second":
        raise ConfigError(f"timed={shown(timed)}: {goal} times nothing; leave it out")
    configs = resolve_candidates(candidates, calibrated=True)
    entries = decide(model, configs[0], filter_fn)
    planned = [entry for entry in entries if kept_anyway(entry) is None]
    if not planned and (done := [e.fqn for e in entries if is_converted(e.tensor)]):
        raise ConfigError(
            f"model: nothing is left to plan, since {done[0]} and {len(done) - 1} others are quantized "
            "already; plan the dense model, or dequantize_ this one first"
        )
    for entry in planned:
        check_quantizable(entry.tensor, entry.fqn)
    measure = _measure(measure, sample, data, goal)
    batches = None if data is None else batches_of(data, "plan")
    if measure is None:
        name, first = ("data", batches[0]) if batches is not None else ("sample", sample)
        assert first is not None
        measure = measure_of(model, first, name)
    predicted = batches is not None and sample is None and measure in ("output", "kl")
    gradients = None
    if predicted and batches is not None and planned:
        gradients = gradients_of(model, batches, planned, measure)
    inputs = gathered(model, batches, planned, configs, measure, progress, predicted=predicted)
    judge = None
    if sample is not None:
        judge = Judge.of(model, [sample], measure="kl" if measure == "kl" else "output")
    elif predicted and batches is not None:
        judge = Judge.of(model, batches, measure=measure, name="data")
    maker = Maker(inputs, {} if predicted else None)
    tensors = {o.fqn: o.tensor for o in owners_of(model) if o.persistent}
    # formats may be larger than dense; only the number of digits counts
    files = Files(4 * sum(tensor.nbytes for tensor in tensors.values()))
    error_of = error_by(measure, judge, gradients, inputs)
    uniform = everywhere(model, configs, planned, filter_fn)
    choices, providers = [], []
    for entry in watched(planned, [entry.fqn for entry in planned], progress, "plan"):
        formats = formats_of(entry.fqn, configs, uniform)
        choice, named = options_of(entry, formats, maker, files, error_of)
        choices.append(choice)
        providers.append(named)
    names = {owner.fqn for entry in planned for owner in entry.owners}
    ties = {owner.fqn: entry.fqn for entry in planned for owner in entry.owners[1:]}
    rest = {name: tensor for name, tensor in tensors.items() if name not in names}
    every = frozenset[str]().union(*(names for options in providers for names in options))
    needs = Needs(providers, *files.frame(rest, every, ties))
    kept = [
        Kept(entry.fqn, files.size(entry.fqn, entry.tensor).total, reason)
        for entry in entries
        if (reason := kept_anyway(entry))
    ]
    dense = QuantizationPlan(
        choices, kept, goal=goal, limit=limit, measure=measure, fixed=needs.base
    )
    whole = None if judge is None else Whole(planned, judge, maker.tensor)
    speeds = None
    if goal == "tokens_per_second" and planned:
        step = timed if timed is not None else _first_token(sample, batches)
        speeds = Speeds.of(dense, uniform, Clock(model, step, planned, maker.tensor))
    return chosen(dense, needs, uniform, whole, speeds, predicted=predicted)


def _first_token(sample: Sample | None, batches: Sequence[Sample] | None) -> Sample:
    batch = sample if sample is not None else batches[0] if batches else None
    step = None if batch is None else first_token(batch)
    if step is None:
        raise ConfigError(
            f"timed=None: tokens_per_second needs an input whose answer counts as one token, and "
            f"{shown(batch)} has no tokens (N, T) as its 'input_ids'; pass timed=, such as one row of it"
        )
    return step


def _goal(
    budget: int | str | None,
    bits: float | None,
    max_kl: float | None,
    tokens_per_second: float | None,
) -> tuple[str, float]:
    given = {
        "budget": budget,
        "bits": bits,
        "max_kl": max_kl,
        "tokens_per_second": tokens_per_second,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        found = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "none"
        raise ConfigError(
            f"give exactly one of budget, bits, max_kl and tokens_per_second; found {found}"
        )
    ((name, value),) = given.items()
    if name == "budget":
        return name, budget_bytes(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < inf:
        return name, float(value)
    raise ConfigError(f"{name}={value!r}: give a positive number")


def _measure(
    measure: str | None, sample: Sample | None, data: Data | None, goal: str
) -> str | None:
    """The measure that is asked for; None: the answer says which."""
    if measure is not None and measure not in MEASURES:
        raise ConfigError(f"measure={measure!r} is unknown; use one of {', '.join(MEASURES)}")
    if goal == "max_kl" and measure not in (None, "kl"):
        raise ConfigError(f"measure={measure!r} does not go with max_kl, which needs 'kl'")
    found = "kl" if goal == "max_kl" else measure
    if sample is None and data is None and found not in ("weight", "layer"):
        asked = "max_kl" if goal == "max_kl" else f"measure={measure!r}" if measure else "plan"
        raise ConfigError(
            f"data=None: {asked} needs inputs to run the model on. Pass data=, batches of inputs; errors of "
            "weights do not tell what the model loses with them, and a plan that goes by them is often worse "
            "than one recipe for all, so measure='weight' has to be asked for"
        )
    return found
