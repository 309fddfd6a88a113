"""`CachePlan`: the recipe of each layer of a cache, with all that was measured to choose it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_core import Spec
from ao_core.ext import ConfigError, UnknownNameError, json_object
from ao_core.ext.reports import aligned
from ao_core.ext.saving import read_text
from ao_core.ext.schema import (
    ANY,
    COUNT,
    FINITE,
    TEXT,
    Fields,
    Items,
    OneOf,
    Optional,
    SchemaError,
    Table,
    check,
)
from ao_hf.cache.functions import functions, solving
from ao_hf.cache.names import EXACT
from ao_hf.cache.report import ranges

if TYPE_CHECKING:
    from ao_quant.kv_cache import KVCacheConfig

__all__ = ["CachePlan", "LayerChoice", "LayerOption", "UniformCache"]

_FORMAT = 1
_SIZE = OneOf((COUNT, FINITE), "a number")
_RECIPE = Optional(OneOf((TEXT, Table(ANY)), "a name or a configuration"))
_OPTION = Fields(
    {"recipe": _RECIPE, "bytes_per_token": _SIZE, "loss": _SIZE, "note": TEXT}, closed=True
)
_CHOICE = Fields({"layer": COUNT, "elements": COUNT, "options": Items(_OPTION, 1), "picked": COUNT})
_UNIFORM = Fields(
    {"recipe": _RECIPE, "bytes_per_token": _SIZE, "loss": _SIZE, "measured": _SIZE}, closed=True
)
#: what the JSON form of a plan must be
_FIELDS = Fields(
    {
        "count": COUNT,
        "goal": TEXT,
        "limit": _SIZE,
        "measured": _SIZE,
        "positions": COUNT,
        "choices": Items(_CHOICE, 1),
        "uniform": Items(_UNIFORM),
    }
)


@dataclass(frozen=True)
class LayerOption:
    """A layer in one of the recipes."""

    #: a name, a configuration, or None: exact
    recipe: KVCacheConfig | str | None
    #: of one row
    bytes_per_token: float
    #: divergence of the answers in bits per position, with this layer alone in the recipe
    loss: float
    #: what was changed about its keys, and why; see `largest_error` of `AoCache`
    note: str = ""


@dataclass(frozen=True)
class LayerChoice:
    """One layer that was planned."""

    layer: int
    #: of the key and the value of one token of one row
    elements: int
    options: tuple[LayerOption, ...]
    #: index of the option chosen
    picked: int

    @property
    def option(self) -> LayerOption:
        """The option chosen."""
        return self.options[self.picked]


@dataclass(frozen=True)
class UniformCache:
    """One recipe for all layers that were planned."""

    recipe: KVCacheConfig | str | None
    #: of one row, all layers together
    bytes_per_token: float
    #: the sum of the losses of the layers
    loss: float
    #: of all layers together
    measured: float


@dataclass(frozen=True, repr=False)
class CachePlan:
    """The recipe of each layer of a model's cache, made by `plan_cache`, for `AoCache(model.config, plan)`.

    `str()` is a table, `to_json` and `save` write all of it.
    """

    #: the layers that see the whole text
    choices: tuple[LayerChoice, ...]
    #: how many layers the model has; those without a choice stay those of transformers
    count: int
    #: what was asked for: "bits", "bytes_per_token" or "max_kl", and how much
    goal: str
    limit: float
    #: divergence of the answers in bits per position, with all layers as planned
    measured: float
    #: positions of the answers that were compared
    positions: int
    #: each candidate for all layers; the plan is the best of those that fit where it would be worse
    uniform: tuple[UniformCache, ...]

    @property
    def layers(self) -> tuple[KVCacheConfig | str | None, ...]:
        """The recipe of each layer of the model, as `AoCache` takes them; None: exact."""
        found = {choice.layer: choice.option.recipe for choice in self.choices}
        return tuple(found.get(index) for index in range(self.count))

    @property
    def picks(self) -> tuple[int, ...]:
        """Index of the option of each choice."""
        return tuple(choice.picked for choice in self.choices)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token of one row takes in the planned layers, in blocks that are quantized."""
        return fsum(choice.option.bytes_per_token for choice in self.choices)

    @property
    def bits(self) -> float:
        """Mean bits per element of keys and values: codes, scales and zero points."""
        return 8.0 * self.bytes_per_token / sum(choice.elements for choice in self.choices)

    @property
    def loss(self) -> float:
        """Sum of the losses of the layers."""
        return fsum(choice.option.loss for choice in self.choices)

    @property
    def taken(self) -> UniformCache | None:
        """The recipe for all layers that this plan is; None: it is none of them."""
        own = {choice.option.recipe for choice in self.choices}
        return next((each for each in self.uniform if own == {each.recipe}), None)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, of added and measured losses; None where fewer than three were measured."""
        points = [(each.loss, each.measured) for each in self.uniform]
        own = [] if self.taken is not None else [(self.loss, self.measured)]
        return solving().rank_correlation([*points, *own])

    def picking(self, picks: Sequence[int], measured: float) -> CachePlan:
        """The same with other options chosen."""
        pairs = zip(self.choices, picks, strict=True)
        choices = tuple(replace(choice, picked=pick) for choice, pick in pairs)
        return replace(self, choices=choices, measured=measured)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        choices = [
            {
                **vars(choice),
                "options": [{**vars(o), "recipe": _encoded(o.recipe)} for o in choice.options],
            }
            for choice in self.choices
        ]
        uniform = [{**vars(each), "recipe": _encoded(each.recipe)} for each in self.uniform]
        return {"ao_cache_plan": _FORMAT, **vars(self), "choices": choices, "uniform": uniform}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CachePlan:
        """Inverse of `to_dict`.

        Raises:
            ConfigError: it is not a plan of a cache, or one of a newer version.
            UnknownNameError: there is no recipe of that name.
            MissingExtraError: ao-quant is not installed.
        """
        if (version := data.get("ao_cache_plan")) != _FORMAT:
            raise ConfigError(
                f"not a plan of a cache of version {_FORMAT}: ao_cache_plan={version!r}"
            )
        try:
            check(data, _FIELDS, "plan")
        except SchemaError as error:
            raise ConfigError(f"not a plan of a cache: {error}") from error
        found = cls(
            tuple(map(_choice, data["choices"])),
            **{name: data[name] for name in ("count", "goal", "limit", "measured", "positions")},
            uniform=tuple(
                UniformCache(**{**each, "recipe": _decoded(each["recipe"])})
                for each in data["uniform"]
            ),
        )
        numbers = [choice.layer for choice in found.choices]
        if numbers != sorted(set(numbers)) or numbers[-1] >= found.count:
            raise ConfigError(
                f"not a plan of a cache: its layers are {', '.join(map(str, numbers))} of {found.count}"
            )
        return found

    def to_json(self) -> str:
        """JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> CachePlan:
        """Inverse of `to_json`; errors as `from_dict`."""
        return cls.from_dict(json_object(text, "plan of a cache"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` into a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CachePlan:
        """Read what `save` wrote; errors as `from_dict`."""
        return cls.from_json(read_text(path))

    def __str__(self) -> str:
        blocks = [aligned([_HEADER, *_rows(self)], right=(2, 3, 4), width=_WIDTH)]
        if self.uniform:
            rows = [_uniform_row(each, self) for each in self.uniform]
            table = aligned([_UNIFORM_HEADER, *rows], right=(1, 2, 3, 4))
            blocks.append(f"one recipe for all:\n{table}")
        rank = self.rank_correlation
        agree = "" if rank is None else f"; added and measured losses agree in rank by {rank:.2f}"
        blocks.append(
            f"{self.goal}={self.limit:g}: {self.bytes_per_token:g} bytes per token in "
            f"{len(self.choices)} of {self.count} layers, {self.bits:.2f} bits per element, KL divergence "
            f"in bits {self.measured:.3g} over {self.positions} positions (added {self.loss:.3g}){agree}"
        )
        return "\n\n".join(blocks)

    def __repr__(self) -> str:
        return f"<CachePlan of {self.count} layers, {self.bytes_per_token:g} bytes per token>"


#: columns of a table at most, whose lists of layers are folded
_WIDTH = 100
_HEADER = ("recipe", "layers", "bytes per token", "bits", "loss")
_UNIFORM_HEADER = ("recipe", "bytes per token", "bits", "loss", "measured", "")


def _rows(plan: CachePlan) -> list[tuple[str, ...]]:
    """One line for each recipe, or part of it whose keys were made wider."""
    alike: dict[tuple[str, str], list[LayerChoice]] = {}
    for choice in plan.choices:
        name = _text(choice.option.recipe)
        note = choice.option.note.partition(",")[0]
        alike.setdefault((name, note), []).append(choice)
    rows: list[tuple[str, ...]] = []
    for (name, note), choices in alike.items():
        size = fsum(choice.option.bytes_per_token for choice in choices)
        loss = fsum(choice.option.loss for choice in choices)
        layers = ranges(choice.layer for choice in choices)
        bits = 8 * size / sum(choice.elements for choice in choices)
        label = f"{name}; {note}" if note else name
        rows.append((label, layers, f"{size:g}", f"{bits:.2f}", f"{loss:.3g}"))
    return rows


def _uniform_row(each: UniformCache, plan: CachePlan) -> tuple[str, ...]:
    bits = 8 * each.bytes_per_token / sum(choice.elements for choice in plan.choices)
    return (
        _text(each.recipe),
        f"{each.bytes_per_token:g}",
        f"{bits:.2f}",
        f"{each.loss:.3g}",
        f"{each.measured:.3g}",
        "taken" if plan.taken == each else "",
    )


def _text(recipe: KVCacheConfig | str | None) -> str:
    """A recipe in a table: one that is no name by its formats."""
    if recipe is None or isinstance(recipe, str):
        return recipe or EXACT
    return f"keys {recipe.key}, values {recipe.value}"


def _encoded(recipe: KVCacheConfig | str | None) -> Any:
    if recipe is None or isinstance(recipe, str):
        return recipe
    given = {each.name: getattr(recipe, each.name) for each in fields(recipe)}
    return {name: x.to_dict() if isinstance(x, Spec) else x for name, x in given.items()}


def _decoded(data: Any) -> Any:
    """A recipe from its JSON form."""
    if data is None:
        return None
    if isinstance(data, str):
        if data not in functions().KV_RECIPES:
            raise UnknownNameError("KV cache recipe", data, functions().KV_RECIPES)
        return data
    given = {name: Spec.from_dict(x) if isinstance(x, dict) else x for name, x in data.items()}
    try:
        return functions().KVCacheConfig(**given)
    except TypeError as error:
        raise ConfigError(f"not a plan of a cache: {error}") from error


def _choice(data: Mapping[str, Any]) -> LayerChoice:
    options = tuple(LayerOption(**{**o, "recipe": _decoded(o["recipe"])}) for o in data["options"])
    if data["picked"] >= len(options) or not data["elements"]:
        raise ConfigError(
            f"not a plan of a cache: layer {data['layer']} has {data['elements']} elements and picks option "
            f"{data['picked']} of {len(options)}"
        )
    return LayerChoice(data["layer"], data["elements"], options, data["picked"])
