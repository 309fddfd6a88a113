"""How transformers loads quantized tensors: parts are put together before its own conversions see them.

A checkpoint has a weight `w` as an entry without elements, and its parts `w.qdata`, `w.scale`, …. Here the
parts take the name of their weight, so that whatever transformers does with the name of a weight (rename it,
add a prefix, collect the weights of all experts) happens to them too. Its converters then get quantized
tensors where they would get dense ones: stacking and joining them are operations of a `QTensor`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_renamings,
)

from ao_core import QTensor
from ao_core.ext import (
    STOCHASTIC,
    CheckpointError,
    ConfigError,
    check_quantizable,
    give_back,
    repack,
)
from ao_core.ext.quantizing import Decision, convert
from ao_core.ext.reports import ParameterRecord
from ao_core.ext.saving import Checkpoint, rebuild, restore
from ao_hf.transformers.foreign import Foreign

__all__ = ["Own", "QuantizeOnLoad", "loading_conversions"]

#: the pattern of conversions that go by exact names
_EXACT = "<weights quantized by ao>"


class Own:
    """A checkpoint that ao wrote."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.path = checkpoint, checkpoint.path
        #: weight of each part
        self.owner_of = {
            leaf: fqn for fqn in checkpoint.records for leaf in checkpoint.entries[fqn].leaves
        }

    @property
    def names(self) -> list[str]:
        """Of the quantized weights, in the files."""
        return list(self.checkpoint.records)

    def make(self, name: str, read: Mapping[str, Tensor]) -> QTensor:
        """A weight of the plain tensors that were read.

        Raises:
            CheckpointError: parts are missing, or do not fit together.
        """
        slots = self.checkpoint.slots

        def take(leaf: str) -> Tensor:
            if leaf not in read:
                raise CheckpointError(f"{self.path}: {leaf!r}, a part of {name!r}, is missing")
            return restore(read[leaf], (slots[leaf].dtype, slots[leaf].shape))

        return rebuild(name, self.checkpoint.records[name], take)

    def nbytes(self, name: str) -> int | None:
        """Bytes of a parameter on disk; None: it is in no file."""
        entry = self.checkpoint.entries.get(name)
        return None if entry is None else entry.nbytes


class _Source:
    """The checkpoint that is loaded; transformers makes deep copies of what holds it."""

    def __init__(self, checkpoint: Own | Foreign) -> None:
        self.checkpoint = checkpoint
        self.owner_of, self.quantized = checkpoint.owner_of, frozenset(checkpoint.names)

    def __deepcopy__(self, memo: object) -> _Source:
        return self

    def tensors(self, read: Mapping[str, Tensor]) -> list[Tensor]:
        """What these plain tensors are, by name: quantized tensors, and dense ones as they are.

        Raises:
            CheckpointError: parts are missing, or do not fit together.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in read.items():
            owner = self.owner_of.get(name, name)
            if owner == name and owner not in self.quantized:
                found[name] = tensor
            elif owner not in found:
                found[owner] = self.checkpoint.make(owner, read)
        return list(found.values())


class _PartNames(WeightRenaming):
    """Gives parts the name of their weight, before all other renamings."""

    __slots__ = ("source",)

    def __init__(self, source: _Source) -> None:
        super().__init__([_EXACT], [_EXACT])
        self.source = source

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The name of the weight that a part belongs to; other names are as they were."""
        return self.source.owner_of.get(source_key, source_key), None


class _Assembling(WeightConverter):
    """A converter that gets quantized tensors in place of their parts."""

    __slots__ = ("keys", "logical_dtype", "source")

    def __init__(
        self,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        operations: list[ConversionOps],
        *,
        source: _Source,
        force_cpu: bool = False,
    ) -> None:
        super().__init__(list(source_patterns), list(target_patterns), operations, force_cpu)
        self.source = source
        self.keys: dict[str, list[str]] = {}
        self.logical_dtype: torch.dtype | None = None

    def add_tensor(
        self, target_key: str, source_key: str, source_pattern: str, future: Future[Tensor]
    ) -> None:
        """Collect a plain tensor, and remember its name."""
        super().add_tensor(target_key, source_key, source_pattern, future)
        self.keys.setdefault(source_pattern, []).append(source_key)

    def materialize_tensors(self) -> dict[str, list[Tensor]]:
        """What was collected for each pattern, parts put together."""
        found = super().materialize_tensors()
        return {
            pattern: self.source.tensors(dict(zip(self.keys[pattern], tensors, strict=True)))
            for pattern, tensors in found.items()
        }

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Tensor]:
        """The parameters that the model's conversion makes, in the layout of the best kernel."""
        made = self._converted(layer_name, model, config, hf_quantizer, loading_info)
        found = {name: v[0] if isinstance(v, list) else v for name, v in made.items()}
        for name, tensor in found.items():
            on_disk = hf_quantizer is not None and hf_quantizer.is_on_disk(name)
            if on_disk and isinstance(tensor, QTensor):
                raise ConfigError(
                    f'device_map has {name} on "disk", and the folder does not hold it as the model does: '
                    'it is joined of several weights. Load the folder without "disk" once, save it with '
                    "save_pretrained, and load that"
                )
        return {name: self._parameter(tensor) for name, tensor in found.items()}

    def _converted(self, layer_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        made: dict[str, Any] = super().convert(layer_name, *args, **kwargs)
        return made

    def _parameter(self, tensor: Tensor) -> nn.Parameter:
        if self.logical_dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.logical_dtype)
        if isinstance(tensor, QTensor):
            learns = STOCHASTIC in tensor.spec.options
            return nn.Parameter(repack(tensor), requires_grad=learns)
        return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())


class _Exact(_Assembling):
    """The converter of quantized weights that no converter of the model takes."""

    __slots__ = ("names",)

    def __init__(self, source: _Source, names: frozenset[str]) -> None:
        super().__init__([_EXACT], [_EXACT], [_Nothing()], source=source)
        self.names = names

    def __deepcopy__(self, memo: object) -> _Exact:
        # transformers copies it for each tensor of a file: nothing is collected yet, and names are shared
        new = copy.copy(self)
        new.collected_tensors, new.layer_targets = defaultdict(list), defaultdict(set)
        new.keys = {}
        return new

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The same name, and whether it is one of them."""
        return source_key, _EXACT if source_key in self.names else None

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Tensor]:
        """The parameter; nothing where it stays on disk: transformers leaves it on the meta device then."""
        if hf_quantizer is None or not hf_quantizer.is_on_disk(layer_name):
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        hf_quantizer.entries[layer_name] = self.source.owner_of[self.keys[_EXACT][0]]
        self.collected_tensors.clear()
        loading_info.missing_keys.discard(layer_name)
        return {}

    def _converted(self, layer_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {layer_name: self.materialize_tensors()[_EXACT]}


class _Nothing(ConversionOps):
    """A converter must have an operation."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What it was given."""
        return input_dict


def loading_conversions(
    conversions: Sequence[WeightTransform], checkpoint: Own | Foreign
) -> list[WeightTransform]:
    """The conversions of a model, for a checkpoint with quantized tensors."""
    source = _Source(checkpoint)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    names = frozenset(apply_renamings(fqn, renamings) for fqn in checkpoint.names)
    wrapped = [_wrapped(c, source) if isinstance(c, WeightConverter) else c for c in conversions]
    return [_PartNames(source), *wrapped, _Exact(source, names)]


def _wrapped(converter: WeightConverter, source: _Source) -> _Assembling:
    made = _Assembling(
        converter._original_source_patterns,
        converter._original_target_patterns,
        converter.operations,
        source=source,
        force_cpu=converter.force_cpu,
    )
    made.scope_prefix, made.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    return made


class QuantizeOnLoad(ConversionOps):
    """Quantizes a weight right after it was read, so that no two of them are dense at a time."""

    def __init__(
        self, decisions: Mapping[str, Decision], records: dict[str, ParameterRecord]
    ) -> None:
        self.decisions, self.records = decisions, records

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The parameter that replaces each; the report gets its record."""
        out: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            decision = self.decisions.get(name)
            if decision is None or decision.config is None:
                out[name] = tensor
                continue
            check_quantizable(tensor, name)
            # what was read requires no gradient, and a parameter that is loaded does
            parameter, record = convert(decision, nn.Parameter(tensor))
            self.records[decision.fqn] = record
            out[name] = tensor if parameter is None else parameter
        give_back()
        return out
