"""`convert_to_float8_training`, and the way back during training."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from ao_core import ComputeWeight, Report, quantize_, resolve_config
from ao_core.ext import ConfigError, ConfigLike, checked
from ao_core.ext.compute import Matmuls
from ao_core.ext.kernels import local_shard
from ao_core.ext.quantizing import EmulationWarning, FilterFn, Progress
from ao_core.ext.reports import ParameterRecord
from ao_float8.config import MIN_MEAN_DIM, Float8LinearConfig

__all__ = ["EmulationWarning", "compute_weights", "convert_to_float8_training", "float8_fallback"]


@checked
def convert_to_float8_training(
    model: nn.Module,
    *,
    config: ConfigLike | None = None,
    module_filter_fn: FilterFn | None = None,
    strict: bool = False,
    progress: Progress = None,
) -> Report:
    """Compute the matmuls of a model's linear layers and experts in float8, forward and backward.

    The weights stay in high precision and modules keep their classes; only the parameters become
    `ComputeWeight`s. A parameter stays the same object, so an optimizer that holds it continues to work.

    Args:
        model: any module.
        config: a `Float8LinearConfig`, another configuration or the name of a recipe; None: one
            scale per tensor, and layers smaller than `MIN_MEAN_DIM` stay.
        module_filter_fn: (module, its name) -> whether its weights are converted, in place of the
            default, which is linear layers, the projections of attention and 3-D experts.
        strict: raise where a weight that was asked for could not be converted; too small ones may stay.
        progress: True for a bar, or a function called with (done, total, name).

    Returns:
        The report of `quantize_`: what each parameter became, or why it stayed unchanged.

    Warns:
        EmulationWarning: matmuls of some weights are emulated, so training will be slower.
        NothingConvertedWarning: every parameter stayed what it was.

    Raises:
        UnknownNameError: no such recipe.
        ConfigError: a name of a `FqnToConfig` matches nothing.
        QuantizationError: weights with NaN or inf, or without values; with `strict`, as above.
    """
    chosen = (
        Float8LinearConfig(min_mean_dim=MIN_MEAN_DIM) if config is None else resolve_config(config)
    )
    return quantize_(model, chosen, module_filter_fn, strict=strict, progress=progress)


def compute_weights(model: nn.Module) -> Iterator[tuple[str, ComputeWeight]]:
    """Name and `ComputeWeight` of each parameter that is one, also where it is sharded; ties once."""
    for name, parameter in model.named_parameters():
        local = local_shard(parameter)
        if isinstance(local, ComputeWeight):
            yield name, local


@checked
def float8_fallback(model: nn.Module, *patterns: str) -> Report:
    """Put layers back into high precision during training; names are matched as in a shell.

    The parameters stay the same objects, so an optimizer, its state and hooks continue to work. A
    compiled model is compiled again at its next call.

    Args:
        model: a model with `ComputeWeight`s, also a sharded one.
        patterns: names of parameters or modules, e.g. "layers.3.*" or "*.wo".

    Returns:
        A report with one record for each `ComputeWeight`: "unchanged" where its matmuls are in high
        precision now, "changed" where they are in low precision still.

    Raises:
        ConfigError: a pattern matches no such parameter, or one that FSDP2 has gathered as float8;
            nothing was changed then.
    """
    weights = list(compute_weights(model))
    matched = {
        pattern: [name for name, _ in weights if _matches(name, pattern)] for pattern in patterns
    }
    for pattern, names in matched.items():
        if not names:
            known = ", ".join(name for name, _ in weights[:5]) or "none"
            raise ConfigError(
                f"the pattern {pattern!r} matches no parameter that computes in low precision; "
                f"the model has {known}{', …' if len(weights) > 5 else ''}"
            )
    back = {name for names in matched.values() for name in names}
    if fixed := [
        name for name, weight in weights if name in back and weight.gather_state.gathers_codes
    ]:
        raise ConfigError(
            f"{fixed[0]} has been gathered as float8, in buffers that FSDP2 keeps, so it cannot go back to "
            "high precision; call float8_fallback before the first forward pass, or convert with "
            "enable_fsdp_float8_all_gather=False"
        )
    for name, weight in weights:
        if name in back:
            weight.matmuls = Matmuls()
    records = tuple(_state(name, weight) for name, weight in weights)
    return Report({"name": "float8_fallback", "patterns": list(patterns)}, records)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a parameter or the module that owns it."""
    return any(fnmatchcase(each, pattern) for each in (name, name.rpartition(".")[0]))


def _state(name: str, weight: ComputeWeight) -> ParameterRecord:
    size = weight.numel() * weight.element_size()
    low = weight.matmuls.any_low
    return ParameterRecord(
        fqn=name,
        status="changed" if low else "unchanged",
        reason="" if low else "its matmuls are back in high precision",
        shape=tuple(weight.shape),
        bytes_before=size,
        bytes_after=size,
    )
