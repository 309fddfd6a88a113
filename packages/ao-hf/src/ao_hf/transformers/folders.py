"""The model of a folder of transformers without its weights, so that files are quantized as the model is."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Split,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ao_core import FolderModel
from ao_core.ext import ConfigError
from ao_hf.decisions import tie

__all__ = ["folder_model"]

#: conversions that join and cut tensors along rows or in stacks, so that codes stay what they are
_JOINS = (Chunk, Concatenate, MergeModulelist, Split, SplitModulelist)


def folder_model(folder: Path, name: str, names: Sequence[str]) -> FolderModel | str:
    """The model that `from_pretrained` would make of a folder, or why it cannot be known; runs no code of it.

    Args:
        folder: where it is.
        name: of the class of the model.
        names: of the tensors in its files.
    """
    named = getattr(transformers, name, None) if name in dir(transformers) else None
    if not isinstance(named, type) or not issubclass(named, PreTrainedModel):
        return f"transformers {transformers.__version__} has no model class {name!r}"
    kind: Any = named
    try:
        own = kind.config_class.from_pretrained(folder)
        own.__dict__.pop("quantization_config", None)
        with torch.device("meta"):
            model = kind(own)
    except Exception as error:  # of a model's code: whatever a configuration leads to
        text = " ".join(str(error).split())[:160]
        return f"{kind.__name__} cannot be made from config.json: {type(error).__name__}: {text}"
    tie(model)
    title = f"{kind.__name__} of transformers {transformers.__version__}"
    found, kept, joins = _parameters_of(model, names)
    fill, places = partial(_fill_buffers, model), partial(_places, model, joins)
    return FolderModel(model, found, kept, title, fill, places)


def _fill_buffers(model: PreTrainedModel) -> None:
    """Give buffers that no file has their values, as `from_pretrained` does; parameters stay as they are.

    Raises:
        ConfigError: the model's code gives one no value.
    """
    filled: list[tuple[str, torch.Tensor]] = []
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                own = torch.empty_like(buffer, device="cpu").fill_(_unset(buffer.dtype))
                module._buffers[name] = own
                module._is_hf_initialized = False
                filled.append((f"{prefix}.{name}", own))
    model.initialize_weights()
    if left := [name for name, buffer in filled if _is_unset(buffer)]:
        raise ConfigError(
            f"the buffer {left[0]} is in no file, and transformers gives it no value; load the model and "
            "call quantize_"
        )


def _is_unset(buffer: torch.Tensor) -> bool:
    if buffer.dtype == torch.bool or not buffer.numel():
        return False
    return bool(
        buffer.isnan().all()
        if buffer.is_floating_point()
        else (buffer == _unset(buffer.dtype)).all()
    )


def _unset(dtype: torch.dtype) -> float | int | bool:
    """What no buffer is filled with."""
    if dtype.is_floating_point:
        return float("nan")
    return False if dtype == torch.bool else int(torch.iinfo(dtype).min)


class _Join(NamedTuple):
    """How a tensor of the files becomes a part of a parameter."""

    converter: WeightConverter
    #: of the converter, which takes the tensor for this one
    pattern: str


def _parameters_of(
    model: PreTrainedModel, names: Iterable[str]
) -> tuple[dict[str, str], dict[str, str], dict[str, _Join]]:
    """The parameter that each tensor becomes, tensors that loading computes something else from, and joins.

    All by the names of tensors; joins in the order in which transformers loads.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found, kept, joins = {}, {}, {}
    # some renamings depend on what came before, in the order in which transformers loads
    for name in sorted(names, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if new not in state and name in state:
            new, pattern = rename_source_key(name, [], [], prefix, state)
        converter = next((c for c in converters if pattern in c.source_patterns), None)
        others = [
            o for o in (converter.operations if converter else ()) if not isinstance(o, _JOINS)
        ]
        if others:
            kept[name] = (
                f"transformers computes {new} from it by {type(others[0]).__name__} on loading"
            )
        elif new in state:
            found[name] = new
            if converter is not None and pattern is not None:
                joins[name] = _Join(converter, pattern)
    return found, kept, joins


def _places(
    model: PreTrainedModel,
    joins: Mapping[str, _Join],
    parameter: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[int | slice, ...]]:
    """Where tensors lie in the parameter that they are joined of; empty where they are not whole there.

    The model's own converter is run on the numbers of their rows: its operations join along rows, or stack.
    """
    own = {name: join for name, join in joins.items() if name in shapes}
    if set(own) != set(shapes) or len({id(join.converter) for join in own.values()}) != 1:
        return {}
    converter = copy.deepcopy(next(iter(own.values())).converter)
    numbers: dict[str, torch.Tensor] = {}
    count = 0
    for name, join in own.items():
        rows = shapes[name][:-1]
        numbers[name] = torch.arange(count, count + prod(rows)).reshape(*rows, 1)
        count += prod(rows)
        converter.add_tensor(parameter, name, join.pattern, partial(_same, numbers[name]))
    made = converter.convert(parameter, model=model, config=model.config).get(parameter)
    if isinstance(made, list):
        made = made[0]
    if not isinstance(made, torch.Tensor) or made.numel() != count:
        return {}
    found: dict[str, tuple[int | slice, ...]] = {}
    where = made.flatten().argsort()
    for name, own_rows in numbers.items():
        first = where[own_rows.flatten()[0]]
        corner = [int(each) for each in torch.unravel_index(first, made.shape[:-1])]
        matrices = len(corner) - (own_rows.dim() - 1)
        ends = zip(corner[matrices:], own_rows.shape, strict=False)
        slices = [slice(start, start + size) for start, size in ends]
        place: tuple[int | slice, ...] = (*corner[:matrices], *slices)
        if not torch.equal(made[place], own_rows):
            return {}
        found[name] = place
    return found


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
