"""`plan_cache`: measure every layer of a cache in every recipe, and choose for the least loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum, inf
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ao_core.ext import ConfigError, checked_but, shown
from ao_core.ext.calibration import Data, batches_of, evaluating
from ao_core.ext.quantizing import Progress, watched
from ao_hf.cache.attention import attending
from ao_hf.cache.choosing import chosen
from ao_hf.cache.functions import functions
from ao_hf.cache.judging import Judge
from ao_hf.cache.names import ATTENTION, EXACT
from ao_hf.cache.plans import CachePlan, LayerChoice, LayerOption, UniformCache

if TYPE_CHECKING:
    from ao_quant.kv_cache import KVCacheConfig

__all__ = ["CACHE_CANDIDATES", "plan_cache"]

#: recipes from 8 to 4 bits
CACHE_CANDIDATES = ("kv8", "k8v4", "kv4")


@checked_but("data", "candidates")
def plan_cache(
    model: nn.Module,
    data: Data,
    *,
    bits: float | None = None,
    bytes_per_token: float | None = None,
    max_kl: float | None = None,
    candidates: Sequence[KVCacheConfig | str] = CACHE_CANDIDATES,
    known: CachePlan | None = None,
    progress: Progress = None,
) -> CachePlan:
    """The best recipe for keys and values of each layer within a budget, for `AoCache(model.config, plan)`.

    The model answers the data with each layer alone in each candidate. What it loses is added up, and the
    choice of least sum within the budget is found exactly. It is measured as a whole, as is each candidate
    for all layers, and the best of those that fit is the plan. Every token of a block of 128 is read from its
    codes meanwhile, also where `AoCache` would keep a window exact. Give exactly one of `bits`,
    `bytes_per_token` and `max_kl`. The model is not changed.

    Args:
        model: a decoder of transformers, quantized or not, whose answer has `logits`.
        data: batches, each token ids (N, T) or a mapping of the model's arguments, of at least 128 tokens.
            The first 256 positions say what layers lose, the first 1024 what plans do.
        bits: mean bits per element of keys and values, scales and zero points included.
        bytes_per_token: of one row, in all layers that see the whole text together.
        max_kl: in bits per position; the fewest bytes are found for which the whole plan, measured on the
            data, diverges no more than that from the model with exact keys and values.
        candidates: configurations or names of `ao_quant.kv_cache.KV_RECIPES`. To leave a layer exact always
            is one.
        known: a plan for another budget, made of the same model, data and candidates: what layers lose is
            taken from it, and not measured again.
        progress: True for a bar, or a function called with (done, total, name).

    Raises:
        ConfigError: the budget cannot be met (says the smallest that can) or is not positive; the model is
            not of transformers, has an encoder, or has no layer that is quantized; the data is too short; or
            `known` is of other layers or candidates.
        UnknownNameError: there is no such candidate.
        QuantizationError: the model answers with NaN or inf.
        MissingExtraError: ao-quant is not installed, or not with its extra "plan".
    """
    goal, limit = _goal(bits=bits, bytes_per_token=bytes_per_token, max_kl=max_kl)
    recipes = _recipes(candidates)
    _check(model)
    batches = [_inputs(batch, i) for i, batch in enumerate(batches_of(data, "plan_cache"))]
    # which reads caches as they are stored, and checks keys
    with evaluating(model), attending(model, ATTENTION):
        judge = Judge.of(model, batches, alone=known is None)
        if known is None:
            choices = _choices(judge, recipes, progress)
            uniform = _uniform(judge, recipes, choices)
        else:
            choices, uniform = _taken(known, judge, recipes)
        dense = CachePlan(choices, judge.layers, goal, limit, 0.0, judge.positions, uniform)
        configs = [None, *(config for _, config in recipes)]

        def error(picks: Sequence[int]) -> float:
            numbers = [choice.layer for choice in choices]
            formats = {i: configs[pick] for i, pick in zip(numbers, picks, strict=True)}
            return judge.measured(formats).loss

        return chosen(dense, error)


def _choices(
    judge: Judge, recipes: Sequence[tuple[KVCacheConfig | str, KVCacheConfig]], progress: Progress
) -> tuple[LayerChoice, ...]:
    """Each layer, exact and alone in each recipe."""
    jobs = [(row, recipe, config) for row in judge.planned for recipe, config in recipes]
    names = [f"layer {row.layer} in {_name(recipe)}" for row, recipe, _ in jobs]
    options = {row.layer: [LayerOption(None, row.bytes_per_token, 0.0)] for row in judge.planned}
    judge = judge.checked(recipes[0][1])
    for row, recipe, config in watched(jobs, names, progress, "plan_cache"):
        found = judge.alone(row.layer, config)
        memory = found.report.layers[row.layer]
        assert memory.bytes_per_token is not None  # it is a layer of ours
        option = LayerOption(recipe, memory.bytes_per_token, found.loss, memory.note)
        options[row.layer].append(option)
    return tuple(
        LayerChoice(row.layer, row.elements, tuple(options[row.layer]), 0) for row in judge.planned
    )


def _uniform(
    judge: Judge,
    recipes: Sequence[tuple[KVCacheConfig | str, KVCacheConfig]],
    choices: Sequence[LayerChoice],
) -> tuple[UniformCache, ...]:
    """Each recipe for all layers."""
    found = []
    for place, (recipe, config) in enumerate(recipes, 1):
        options = [choice.options[place] for choice in choices]
        size, loss = (fsum(o.bytes_per_token for o in options), fsum(o.loss for o in options))
        formats = {choice.layer: config for choice in choices}
        found.append(UniformCache(recipe, size, loss, judge.measured(formats).loss))
    return tuple(found)


def _taken(
    known: CachePlan, judge: Judge, recipes: Sequence[tuple[KVCacheConfig | str, KVCacheConfig]]
) -> tuple[tuple[LayerChoice, ...], tuple[UniformCache, ...]]:
    """What was measured for another plan."""
    names = ", ".join(_name(recipe) for recipe, _ in recipes)
    options = (None, *(recipe for recipe, _ in recipes))
    asked = [(row.layer, row.elements, options) for row in judge.planned]
    found = [(c.layer, c.elements, tuple(o.recipe for o in c.options)) for c in known.choices]
    if asked != found or known.positions != judge.positions:
        raise ConfigError(
            f"known={known!r} is of other layers, positions or candidates than {len(asked)} layers, "
            f"{judge.positions} positions and {names}; leave it out"
        )
    return tuple(replace(choice, picked=0) for choice in known.choices), known.uniform


def _check(model: Any) -> None:
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig) or not hasattr(model, "set_attn_implementation"):
        raise ConfigError(f"model={shown(model)}: use a model of transformers that generates text")
    if config.is_encoder_decoder:
        raise ConfigError(
            f"model={shown(model)}: it has an encoder, whose cross-attention has a cache of its own, and "
            "only caches of decoders are planned; use AoEncoderDecoderCache with one recipe"
        )


def _inputs(batch: Any, place: int) -> dict[str, Any]:
    if isinstance(batch, Tensor):
        return {"input_ids": batch}
    if isinstance(batch, Mapping):
        return dict(batch)
    raise ConfigError(
        f"data[{place}]={shown(batch)}: give token ids (N, T), or a mapping of the model's arguments"
    )


def _name(recipe: KVCacheConfig | str) -> str:
    return recipe if isinstance(recipe, str) else "a format of your own"


def _recipes(candidates: Any) -> list[tuple[KVCacheConfig | str, KVCacheConfig]]:
    """Candidates as they were given, and as they are measured: without an exact window."""
    if isinstance(candidates, (str, bytes)) or not isinstance(candidates, Sequence):
        raise ConfigError(
            f"candidates={shown(candidates)}: give a list, such as {CACHE_CANDIDATES}"
        )
    found: dict[KVCacheConfig, KVCacheConfig | str] = {}
    for place, recipe in enumerate(candidates):
        if isinstance(recipe, str) and recipe == EXACT:
            continue  # it always is one
        known = functions().KV_RECIPES
        if not isinstance(recipe, (str, type(known["kv8"]))):
            raise ConfigError(
                f"candidates[{place}]={shown(recipe)}: use a KVCacheConfig or one of {', '.join(known)}"
            )
        found.setdefault(functions().kv_config(recipe), recipe)
    if not found:
        raise ConfigError(
            f"candidates={shown(candidates)}: give at least one recipe, such as {CACHE_CANDIDATES}"
        )
    if len(windows := {config.window for config in found}) > 1:
        raise ConfigError(
            f"candidates have windows of {', '.join(map(str, sorted(windows)))} tokens: use one window in "
            "all of them, as layers of one cache must"
        )
    return [(recipe, replace(config, window=0)) for config, recipe in found.items()]


def _goal(**given: float | None) -> tuple[str, float]:
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) != 1:
        text = ", ".join(f"{name}={value!r}" for name, value in found.items()) or "none"
        raise ConfigError(f"give exactly one of {', '.join(given)}; found {text}")
    ((name, value),) = found.items()
    if type(value) in (int, float) and 0 < value < inf:
        return name, float(value)
    raise ConfigError(f"{name}={value!r}: give a positive number")
