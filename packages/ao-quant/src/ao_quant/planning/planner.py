"""`plan`: measure every parameter in every candidate format, and choose for the least total error."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from torch import Tensor, nn

from ao_core import Config, QTensor, Skip
from ao_core.ext import ConfigError, ConfigLike, check_quantizable, checked_but, is_converted
from ao_core.ext.calibration import Data, Inputs, Sample, answer, batches_of
from ao_core.ext.quantizing import Decision, FilterFn, Progress, watched
from ao_core.ext.quantizing import decide as decide
from ao_core.ext.saving import owners_of
from ao_quant.planning.calibrated import OF_LAYERS, gathered, layer_error, solved
from ao_quant.planning.candidates import kept_anyway, resolve_candidates
from ao_quant.planning.choose import Needs, below_divergence, within_bits, within_budget
from ao_quant.planning.gradients import Gradients, output_gradients, predicted_error
from ao_quant.planning.measure import MEASURES, distance, weight_error
from ao_quant.planning.result import Choice, Kept, Option, QuantizationPlan
from ao_quant.planning.sizes import Files, budget_bytes

__all__ = ["CANDIDATES", "plan"]

#: what is not planned again
#: recipes from 8 to 2 bits
CANDIDATES = (
    "int8_weight_only",
    "intx_weight_only",
    "int4_weight_only/g32-asymmetric",
    "int4_weight_only",
    "intx_weight_only/3bit",
    "intx_weight_only/2bit",
)


@checked_but("data")
def plan(
    model: nn.Module,
    *,
    budget: int | str | None = None,
    bits: float | None = None,
    max_kl: float | None = None,
    candidates: Sequence[ConfigLike] = CANDIDATES,
    sample: Sample | None = None,
    data: Data | None = None,
    measure: str | None = None,
    filter_fn: FilterFn | None = None,
    progress: Progress = None,
) -> QuantizationPlan:
    """The best format for each weight within a budget, as a configuration for `quantize_`.

    The error of each weight in each candidate format is measured alone, errors are added up, and the
    choice of least sum within the budget is found exactly. Exactly one of `budget`, `bits` and
    `max_kl` is given. The model is not changed; one weight at a time is held in one more format.

    Args:
        model: any module; what `quantize_` would quantize is planned, the rest is kept.
        budget: bytes that the files of `save_model` may have, all of them together, as a number or
            "1.2GB".
        bits: mean bits per planned weight, scales and zero points included.
        max_kl: in bits per position; the smallest files are found for which the whole plan, measured
            on the sample, diverges no more than that from the model.
        candidates: configurations or names of recipes, also those that need data. To leave a weight as it
            is always is one.
        sample: input of the model: a tensor, a tuple of arguments, or a mapping of them.
        data: for candidates that need calibration data, and for measure="layer" or "gradient", batches as for
            `quantize_`, which needs them again for the plan. Statistics of all weights are held at once.
        measure: "weight": noise over signal of a weight's values, which needs no sample but has to be asked
            for, since it does not tell what the model loses; "layer": the same of the weight's outputs on
            the data, without running the model for each candidate; "gradient": that error weighted by the
            squared gradients of the model's answers by each output, which predicts "output" from one
            backward pass over the data, for weights of linear layers;
            "output": the same of the model's answer to the sample (the default with one); "kl": the
            divergence of its answer as logits over the last dimension (always with `max_kl`).
        filter_fn: as in `quantize_`: (module, its name) -> whether its weights are planned, for
            instance to plan embeddings too.
        progress: True for a bar, or a function called with (done, total, name).

    Raises:
        ConfigError: the budget cannot be met (says the smallest that can), is not positive, or
            arguments contradict each other; there is neither a sample nor measure="weight"; or the model is
            quantized already.
        QuantizationError: weights with NaN or inf, or on the meta device.
        MissingExtraError: scipy is not installed (extra "plan").
    """
    goal, limit = _goal(budget, bits, max_kl)
    measure = _measure(measure, sample, goal)
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
    gradients = None
    if measure == "gradient":
        batches = batches_of(data, "measure='gradient'")
        gradients, data = output_gradients(model, batches, planned), batches
    inputs = gathered(model, data, planned, configs, measure, progress)
    tensors = {o.fqn: o.tensor for o in owners_of(model) if o.persistent}
    # formats may be larger than dense; only the number of digits counts
    files = Files(4 * sum(tensor.nbytes for tensor in tensors.values()))
    right = None if sample is None else answer(model, sample)
    choices, providers = [], []
    for entry in watched(planned, [entry.fqn for entry in planned], progress, "plan"):
        seen = inputs.get(entry.fqn)
        choice, named = _options(
            model, entry, configs, files, measure, sample, right, seen, gradients
        )
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

    def together(found: QuantizationPlan) -> QuantizationPlan:
        """With the error that all choices have together on the sample."""
        if sample is None or right is None:
            return found
        replacements = [
            (entry.owners, new)
            for entry, choice in zip(planned, found.choices, strict=True)
            if choice.option.config is not None
            and isinstance(
                new := solved(entry, choice.option.config, inputs.get(entry.fqn)), Tensor
            )
        ]
        error = distance("kl" if measure == "kl" else "output")(
            right, answer(model, sample, replacements)
        )
        return found.picking(found.picks, measured=error)

    if goal == "max_kl":
        found = below_divergence(dense, together)
    else:
        found = together(within_budget(dense, needs) if goal == "budget" else within_bits(dense))
    return found.picking(found.picks, measured=found.measured, fixed=needs.fixed(found.picks))


def _goal(budget: int | str | None, bits: float | None, max_kl: float | None) -> tuple[str, float]:
    given = {"budget": budget, "bits": bits, "max_kl": max_kl}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        found = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "none"
        raise ConfigError(f"give exactly one of budget, bits and max_kl; found {found}")
    ((name, value),) = given.items()
    if name == "budget":
        return name, budget_bytes(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < inf:
        return name, float(value)
    raise ConfigError(f"{name}={value!r}: give a positive number")


def _measure(measure: str | None, sample: Sample | None, goal: str) -> str:
    if measure is not None and measure not in MEASURES:
        raise ConfigError(f"measure={measure!r} is unknown; use one of {', '.join(MEASURES)}")
    if goal == "max_kl" and measure not in (None, "kl"):
        raise ConfigError(f"measure={measure!r} does not go with max_kl, which needs 'kl'")
    found = "kl" if goal == "max_kl" else measure or ("weight" if sample is None else "output")
    if sample is None and measure is None and goal != "max_kl":
        raise ConfigError(
            "sample=None: errors of weights do not tell what the model loses with them, and a plan that "
            "goes by them is often worse than one recipe for all; pass sample=, an input of the model, or "
            "measure='weight' to plan without data all the same"
        )
    if found not in ("weight", *OF_LAYERS) and sample is None:
        asked = "max_kl" if goal == "max_kl" else f"measure={measure!r}"
        raise ConfigError(f"sample=None: {asked} needs an input to run the model on")
    return found


def _options(
    model: nn.Module,
    entry: Decision,
    configs: list[Config],
    files: Files,
    measure: str,
    sample: Sample | None,
    right: Tensor | None,
    inputs: Inputs | None,
    gradients: Gradients | None,
) -> tuple[Choice, list[frozenset[str]]]:
    """A parameter in every format that can hold it, and who provides each."""
    size = files.size(entry.fqn, entry.tensor)
    options = [Option(None, size.total, size.data, 0.0)]
    refused, providers = [], [size.providers]
    for config in configs:
        new = solved(entry, config, inputs)
        if not isinstance(new, QTensor):
            reason = new.reason if isinstance(new, Skip) else "its memory stays as it is"
            refused.append((config, reason))
            continue
        of_layer = layer_error(entry, new, inputs) if measure == "layer" else None
        if gradients is not None:
            of_layer = predicted_error(entry, new, inputs, gradients)
        if of_layer is not None:
            error = of_layer
        elif sample is None or right is None or measure in ("weight", *OF_LAYERS):
            error = weight_error(entry.tensor.detach(), new)
        else:
            error = distance(measure)(right, answer(model, sample, [(entry.owners, new)]))
        size = files.size(entry.fqn, new)
        if isfinite(error):
            options.append(Option(config, size.total, size.data, error))
            providers.append(size.providers)
        else:
            refused.append((config, f"the error is {error}"))
    tied = tuple(owner.fqn for owner in entry.owners[1:])
    shape = tuple(entry.tensor.shape)
    return Choice(entry.fqn, shape, tuple(options), 0, tied, tuple(refused)), providers
