"""`prepare`, `calibrate`, `convert`: the steps to static scales of activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from ao_core import Config, FqnToConfig, Report, Skip, resolve_config
from ao_core.ext import (
    ConfigError,
    ConfigLike,
    QuantizationError,
    check_quantizable,
    checked,
    is_converted,
)
from ao_core.ext.calibration import observing, operand
from ao_core.ext.quantizing import (
    Decision,
    FilterFn,
    Progress,
    apply_decisions,
    decide,
    transformed,
)
from ao_quant.calibration.judging import OutlierWarning, warn_of_outliers
from ao_quant.calibration.result import Calibration, Watched, config_of
from ao_quant.configs import StaticConfig

__all__ = ["OutlierWarning", "calibrate", "convert", "discard", "prepare"]

#: the attribute of a prepared model
_ATTRIBUTE = "_ao_calibration"
_UNSEEN = ("error", "keep")


@checked
def prepare(model: nn.Module, config: ConfigLike, filter_fn: FilterFn | None = None) -> Calibration:
    """Decide what is to be quantized, and whose activations calibration shall see; changes no weight.

    Args:
        model: as for `quantize_`. Its layers compute what they did: nothing in it is replaced.
        config: `Int8StaticActivationInt8WeightConfig`, `Float8StaticActivationFloat8WeightConfig`,
            `NVFP4StaticActivationNVFP4WeightConfig`, or a `FqnToConfig` with one of them; other
            configurations in it are applied by `convert`.
        filter_fn: as for `quantize_`.

    Returns:
        What calibration sees, to look at; the model has it too.

    Raises:
        ConfigError: the model is prepared already, or nothing in it waits for calibration.
        QuantizationError: a weight has NaN or inf, or is on the meta device.
        UnknownNameError: no such recipe.
    """
    for name, module in model.named_modules():
        if _ATTRIBUTE in vars(module):
            raise ConfigError(
                f"{name or 'the model'} is prepared already: calibrate and convert it, or call "
                "ao_quant.discard on it"
            )
    config = resolve_config(config)
    for each in _configs(config):
        ready(each).check()
    calibration = Calibration(tuple(decide(model, config, filter_fn)))
    reasons = []
    for entry in calibration.decisions:
        if reason := _nothing_to_observe(entry):
            reasons.append(f"{entry.fqn}: {reason}")
            continue
        assert isinstance(entry.config, StaticConfig)
        calibration.watched[entry.fqn] = Watched.start(entry.config, entry)
    if not calibration.watched:
        raise ConfigError(
            f"config={config!r}: no weight would get activations with static scales, so there is nothing to "
            f"calibrate; quantize_ applies it. {'; '.join(reasons[:5])}"
        )
    setattr(model, _ATTRIBUTE, calibration)
    return calibration


@checked
@contextmanager
def calibrate(model: nn.Module) -> Iterator[Calibration]:
    """Within this context all that a prepared model computes is observed; it may be entered again.

    Compiled models run without their compiled code meanwhile, which matmuls could not be seen in.

    Raises:
        ConfigError: the model is not prepared, or is in such a context already.
        QuantizationError: out of the model's own call, where activations have NaN or inf; names the layer.
    """
    calibration = _of(model, "calibrate")
    weights = [
        (p.fqn, operand(p.tensor, p.owners[0]))
        for p in calibration.decisions
        if p.fqn in calibration.watched
    ]
    calibration.active = True
    try:
        with observing(weights, calibration.note):
            yield calibration
    finally:
        calibration.active = False


@checked
def convert(
    model: nn.Module,
    *,
    unseen: str = "error",
    device: torch.device | str | None = None,
    strict: bool = False,
    progress: Progress = None,
) -> Report:
    """Quantize a prepared model in place, with the scales that calibration found.

    Args:
        model: as it was prepared.
        unseen: what to do with weights that saw no data: "error", or "keep" them as they are, which the
            report then says.
        device: as for `quantize_`.
        strict: as for `quantize_`.
        progress: as for `quantize_`.

    Returns:
        The report of `quantize_`; its configuration has the scales, by name, and can be applied again to the
        model as it was, or to its checkpoint.

    Raises:
        ConfigError: the model is not prepared, or was converted, or is within `calibrate` still.
        QuantizationError: weights saw no data, or what `quantize_` raises; the model is as it was.

    Warns:
        OutlierWarning: products of some weights are much less accurate with one scale than with scales of
            each call; it names them, and what they get by `on_outliers` of their configuration.
    """
    if unseen not in _UNSEEN:
        raise ConfigError(f"unseen={unseen!r}: use one of {', '.join(map(repr, _UNSEEN))}")
    calibration = _of(model, "convert")
    if calibration.unseen and unseen == "error":
        raise QuantizationError(
            f"{', '.join(calibration.unseen)} saw no data between prepare and convert: run batches that "
            "reach them within `with calibrate(model):`, leave them out of the configuration, or pass "
            "unseen='keep'"
        )
    decisions, outliers, notes = calibration.decided()
    warn_of_outliers(outliers)
    found = config_of([entry for entry in decisions if not _waits(entry.config)])
    report = apply_decisions(
        model, found, decisions, device=device, strict=strict, progress=progress
    )
    delattr(model, _ATTRIBUTE)
    records = [replace(each, note=notes.get(each.fqn, each.note)) for each in report.records]
    return replace(report, records=tuple(records))


@checked
def discard(model: nn.Module) -> None:
    """Undo `prepare`: forget what calibration saw.

    Raises:
        ConfigError: the model is not prepared, or within `calibrate`.
    """
    _of(model, "discard")
    delattr(model, _ATTRIBUTE)


def _of(model: nn.Module, step: str) -> Calibration:
    calibration = getattr(model, _ATTRIBUTE, None)
    if not isinstance(calibration, Calibration):
        raise ConfigError(
            f"{step}: this {type(model).__name__} is not prepared, or was converted already; call "
            "ao_quant.prepare(model, config) first, on the same module"
        )
    if calibration.active:
        raise ConfigError(f"{step}: the model is within `with calibrate(model):`; leave it first")
    return calibration


def _configs(config: Config) -> list[Config]:
    if not isinstance(config, FqnToConfig):
        return [config]
    return [each for _, each in config.entries if each is not None]


def _waits(config: Config | None) -> bool:
    return isinstance(config, StaticConfig) and config.act_scale is None


def ready(config: Config) -> Config:
    """The configuration, with some scale where it waits for one."""
    if not _waits(config):
        return config
    assert isinstance(config, StaticConfig)
    act = config.weight_format(torch.float32).spec.act
    return config.calibrated(1.0, None if act is None or act.zero_point == "none" else 0)


def _nothing_to_observe(entry: Decision) -> str | None:
    """Why there is nothing to observe for a parameter; None where there is."""
    if entry.config is None:
        return entry.reason
    if not _waits(entry.config):
        return f"{type(entry.config).__name__} does not wait for data"
    tensor = entry.tensor
    if is_converted(tensor):
        return "its matmuls are in low precision already"
    check_quantizable(tensor, entry.fqn)
    tried = replace(entry, config=ready(entry.config))
    new = transformed(tried, torch.empty_like(tensor, device="meta"))
    return new.reason if isinstance(new, Skip) else None
