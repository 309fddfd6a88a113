"""What `AoCache(kv=…)` takes, as the format of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ao_core.ext import ConfigError, UnknownNameError, shown
from ao_hf.cache.functions import functions
from ao_hf.cache.names import EXACT
from ao_hf.cache.plans import CachePlan

if TYPE_CHECKING:
    from ao_quant.kv_cache import KVCacheConfig

__all__ = ["QUANTIZED", "Formats", "LayerFormat", "Recipe", "Recipes", "formats_of", "numbered"]

#: the layer type that is quantized; windows, chunks and states are small, and stay those of transformers
QUANTIZED = "full_attention"

#: a configuration, a name of `ao_quant.kv_cache.KV_RECIPES`, or "exact" or None
Recipe: TypeAlias = "KVCacheConfig | str | None"
#: one recipe for all layers, one for each, those of some layers by number, or a plan
Recipes: TypeAlias = "Recipe | Sequence[Recipe] | Mapping[int, Recipe] | CachePlan"


class LayerFormat(NamedTuple):
    """How ao keeps the keys and values of a layer."""

    #: of the recipe
    name: str
    #: None: as they are
    config: KVCacheConfig | None


class Formats(NamedTuple):
    """Those of all layers of a model."""

    #: None: the layer is that of transformers
    layers: tuple[LayerFormat | None, ...]
    #: what errors and warnings call them
    name: str
    #: whether any layer was to be quantized
    asked: bool


def formats_of(kv: Recipes, kinds: Sequence[str]) -> Formats:
    """The format of each layer.

    Args:
        kv: what `AoCache` takes.
        kinds: the types of the layers of a model.

    Raises:
        ConfigError: there is another number of recipes than of layers, a layer does not exist, is named twice
            or is never quantized, or recipes have different windows.
        UnknownNameError: there is no such recipe.
    """
    if isinstance(kv, CachePlan):
        kv = kv.layers
    if isinstance(kv, Mapping):
        kv = _spread(kv, len(kinds))
    if isinstance(kv, Sequence) and not isinstance(kv, (str, bytes)):
        return _each(kv, kinds)
    found = _format(kv)
    layers = tuple(found if kind == QUANTIZED else None for kind in kinds)
    return Formats(layers, found.name, found.config is not None)


def numbered(name: str, index: Any, count: int) -> int:
    """The number of a layer, where negative ones count from the end.

    Raises:
        ConfigError: there is no such layer; `name` is the argument that has it.
    """
    if type(index) is not int or not -count <= index < count:
        raise ConfigError(
            f"{name} has {shown(index)}; this model has layers 0 to {count - 1}, and negative numbers count "
            "from the end"
        )
    return index % count


def _spread(kv: Mapping[int, Recipe], count: int) -> list[Recipe]:
    """One recipe for each layer; those that are not named stay exact."""
    if not kv:
        raise ConfigError(
            "kv={}: give recipes of layers by their numbers; layers without one stay exact, and kv='exact' "
            "is all of them"
        )
    found: dict[int, Recipe] = {}
    for key, recipe in kv.items():
        index = numbered("kv", key, count)
        if index in found:
            raise ConfigError(f"kv has layer {index} twice, as {index} and {index - count}")
        found[index] = recipe
    return [found.get(index) for index in range(count)]


def _each(kv: Sequence[Recipe], kinds: Sequence[str]) -> Formats:
    if len(kv) != len(kinds):
        raise ConfigError(
            f"kv has {len(kv)} recipes, and this model has {len(kinds)} layers: give one for each, None for "
            "those that stay exact, or a mapping of the numbers of some layers to recipes"
        )
    given = [_format(recipe, index) for index, recipe in enumerate(kv)]
    layers = tuple(None if each.config is None else each for each in given)
    other = [i for i, each in enumerate(layers) if each is not None and kinds[i] != QUANTIZED]
    if other:
        raise ConfigError(
            f"kv={given[other[0]].name!r} for layer {other[0]}, which is {kinds[other[0]]}: only layers that "
            f"see the whole text are quantized; give None for layers {', '.join(map(str, other))}"
        )
    windows = {each.config.window for each in given if each.config is not None}
    if len(windows) > 1:
        raise ConfigError(
            f"kv has recipes with windows of {', '.join(map(str, sorted(windows)))} tokens: use one window "
            "in all of them, since blocks of all layers are quantized at once"
        )
    names = dict.fromkeys(each.name for each in layers if each is not None)
    return Formats(layers, " and ".join(names), any(layers))


def _format(recipe: Any, index: int | None = None) -> LayerFormat:
    """A recipe as a format; `index`: of the layer that it is for, if it is one of many."""
    if recipe is None or (isinstance(recipe, str) and recipe == EXACT):
        return LayerFormat(EXACT, None)
    known = functions().KV_RECIPES
    if index is not None and isinstance(recipe, str) and recipe not in known:
        raise UnknownNameError(f"KV cache recipe in kv[{index}]", recipe, [*known, EXACT])
    if index is not None and not isinstance(recipe, (str, type(known["kv8"]))):
        raise ConfigError(
            f"kv[{index}]={shown(recipe)}: use a KVCacheConfig, None, or one of "
            f"{', '.join((*known, EXACT))}"
        )
    config = functions().kv_config(recipe)
    named = (name for name, each in known.items() if each == config)
    return LayerFormat(next(named, "this format"), config)
