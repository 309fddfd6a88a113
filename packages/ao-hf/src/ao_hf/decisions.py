"""What becomes of each parameter of a model that a library is about to load: as `quantize_` decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ao_core import ComputeWeight, Config, QTensor, Report, config_to_dict
from ao_core.ext import ConfigError, registry
from ao_core.ext.quantizing import Decision, convert, decide, transformed
from ao_core.ext.reports import ParameterRecord

__all__ = ["check_quantized", "decisions_of", "report_of", "size_of", "tie"]


def decisions_of(model: Any, config: Config, kept: Sequence[str]) -> dict[str, Decision]:
    """The decision for each name of a parameter, for a model on the meta device.

    Args:
        model: whose tied parameters are not tied yet.
        config: as for `quantize_`.
        kept: names of modules whose parameters stay as they are.

    Raises:
        ConfigError: as `quantize_` raises it, a name of `kept` is that of no module, or a configuration
            changes what no file holds.
    """
    untied = tie(model)
    try:
        decisions = decide(model, config, None)
    finally:
        for module, name, parameter in untied:
            module._parameters[name] = parameter
    modules = [name for name, _ in model.named_modules()]
    for name in kept:
        if not any(_within(module, name) for module in modules):
            raise ConfigError(
                f"modules_to_not_convert={list(kept)!r}: {name!r} is the name of no module of "
                f"{type(model).__name__}"
            )
    chosen = [_kept(decision, kept) for decision in decisions]
    _check_stored(chosen)
    return {owner.fqn: decision for decision in chosen for owner in decision.owners}


def _check_stored(decisions: Sequence[Decision]) -> None:
    """Raise `ConfigError` for low-precision training: its weights stay dense, and only matmuls change."""
    first: dict[type[Config], Decision] = {}
    for decision in decisions:
        if decision.config is not None:
            first.setdefault(type(decision.config), decision)
    for kind, decision in first.items():
        transform = registry.transform_for(kind)
        if transform.needs_values or not isinstance(
            _on_meta(decision, decision.tensor), ComputeWeight
        ):
            continue
        raise ConfigError(
            f"config={transform.name!r} trains in low precision: weights stay as they are, and no file says "
            "how they are multiplied. Load the model without it; then call quantize_(model, config), or give "
            "ao_hf.training.low_precision_training(config) to Trainer. After loading again, do so again"
        )


def _on_meta(decision: Decision, tensor: Tensor) -> Any:
    """What a parameter would become, without its values."""
    return transformed(decision, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def tie(model: Any) -> list[tuple[nn.Module, str, Any]]:
    """Tie the parameters that will be tied once they are loaded; returns what was there."""
    before = []
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        module, name = _place(model, target)
        before.append((module, name, module._parameters[name]))
        owner, source_name = _place(model, source)
        module._parameters[name] = owner._parameters[source_name]
    return before


def _place(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    path, _, name = fqn.rpartition(".")
    return model.get_submodule(path), name


def _within(fqn: str, name: str) -> bool:
    """Whether a module is the named one, or in it; a name may leave out what is in front."""
    return f".{name}." in f".{fqn}."


def _kept(decision: Decision, names: Sequence[str]) -> Decision:
    paths = [owner.fqn.rpartition(".")[0] for owner in decision.owners]
    for name in names:
        if decision.config is not None and any(_within(path, name) for path in paths):
            return replace(decision, config=None, reason=f"modules_to_not_convert has {name!r}")
    return decision


def size_of(decision: Decision, tensor: Tensor) -> float:
    """Bytes per element that a parameter will have; those it has where only its values would tell."""
    if decision.config is None:
        return float(tensor.element_size())
    new = _on_meta(decision, tensor)
    if not isinstance(new, QTensor):
        return float(tensor.element_size())
    return new.stored_bytes / max(tensor.numel(), 1)


def report_of(
    config: Config, decisions: Mapping[str, Decision], records: Mapping[str, ParameterRecord]
) -> Report:
    """The report of a model that was quantized while it was loaded.

    Args:
        config: what was asked for.
        decisions: of all parameters, by the names under which they were looked for.
        records: those of the ones that were quantized, by their names in the model.
    """
    by_name = {decision.fqn: decision for decision in decisions.values()}
    found = tuple(records.get(name) or _kept_record(decision) for name, decision in by_name.items())
    return Report(config_to_dict(config), found)


def check_quantized(model: Any, quantizer: type) -> None:
    """Raise `ConfigError` where a model has no quantized parameter, or weights of another method.

    A quantizer of another class that left only dense weights, as that of a GGUF file which was dequantized
    while it was loaded, has nothing more to say of the model.
    """
    if not any(isinstance(parameter, QTensor) for parameter in model.parameters()):
        raise ConfigError(f"{type(model).__name__} has no parameter that is quantized by ao")
    other = getattr(model, "hf_quantizer", None)
    if other is not None and not isinstance(other, quantizer) and _has_foreign_codes(model):
        method = other.quantization_config.quant_method
        raise ConfigError(
            f"{type(model).__name__} is quantized by {getattr(method, 'value', method)} already"
        )


def _has_foreign_codes(model: Any) -> bool:
    """Whether tensors hold codes of another method: in integers, in float8, or in a tensor class of its own.

    Positions and masks, which dense models hold too, are in int64 and bool.
    """
    dense = (torch.int64, torch.bool)
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, QTensor | ComputeWeight):
            continue
        narrow = (
            tensor.dtype.itemsize < 2 if tensor.is_floating_point() else tensor.dtype not in dense
        )
        if narrow or is_traceable_wrapper_subclass(tensor):
            return True
    return False


def _kept_record(decision: Decision) -> ParameterRecord:
    """The record of a parameter that was not quantized."""
    if decision.config is not None:
        reason = "the files have no such weight: it was initialized, and is to be trained"
        decision = replace(decision, config=None, reason=reason)
        return replace(convert(decision, decision.tensor)[1], status="skipped")
    return convert(decision, decision.tensor)[1]
