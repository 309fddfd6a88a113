"""Configurations that need calibration data, and those that need none: one of both must fit what is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ao_core.arguments import shown
from ao_core.calibration.inputs import Data, Seen, batches_of
from ao_core.calibration.samples import Sample
from ao_core.config import Config, ConfigLike, FqnToConfig, config_to_dict, resolve_config
from ao_core.errors import ConfigError
from ao_core.records import Algorithm
from ao_core.registry import registry
from ao_core.report import ParameterRecord, Report
from ao_core.stacks import check_order, stack_of

__all__ = [
    "QUANTIZED",
    "SEQUENCE",
    "algorithm_of",
    "check_data",
    "check_useful",
    "joined",
    "needs_data",
    "resolved",
]


#: the one key of what stands for several configurations
SEQUENCE = "sequence"
#: how the reason of a weight begins that was a `QTensor` before
QUANTIZED = "it is quantized already"


def resolved(config: ConfigLike | Sequence[ConfigLike]) -> list[Config]:
    """A configuration, or each of a list, from whatever stands for it. The `config` of a report does.

    Raises:
        ConfigError: the list is empty, or holds something else.
        UnknownNameError: no such recipe.
    """
    if isinstance(config, Mapping) and set(config) == {SEQUENCE}:
        config = config[SEQUENCE]
    if isinstance(config, (str, Config, Mapping)) or not isinstance(config, Sequence):
        config = [config]
    if not config:
        raise ConfigError("config=[]: need at least one configuration")
    found: list[Config] = []
    for each in config:
        stack = stack_of(each) if isinstance(each, str) and each not in registry.recipes else None
        found += stack if stack is not None else [resolve_config(each)]
    return found


def algorithm_of(config: Config | None) -> Algorithm | None:
    """The algorithm that a configuration needs data for; None where it needs none."""
    if config is None:
        return None
    algorithm = registry.algorithm_for(type(config))
    return algorithm if algorithm is not None and algorithm.needs(config) else None


def needs_data(config: Config) -> bool:
    """Whether a configuration, or one of a `FqnToConfig`, needs data."""
    return any(algorithm_of(each) is not None for each in _each(config))


def check_data(
    configs: Sequence[Config],
    data: Data | None,
    how: str = "quantize_(model, config, data=batches)",
) -> Sequence[Sample] | Seen | None:
    """The batches, or what was seen of some, once it is sure that all configurations can be applied.

    None without data.

    Raises:
        ConfigError: data is given and nothing needs it, or the other way round, or the order of the
            configurations makes no sense, or one of them has other reasons.
    """
    needing = []
    for config in configs:
        needy = [leaf for leaf in _each(config) if _needs(leaf)]
        needing += needy
        if data is None or not needy:
            config.check()
            continue
        for leaf in _each(config):
            if not _needs(leaf):
                leaf.check()
    if needing and data is None:
        raise ConfigError(
            f"config={shown(needing[0])}: it needs calibration data; pass a list of inputs of the model, "
            f"{how}"
        )
    check_order(configs)
    if data is None:
        return None
    if not needing:
        each = [leaf for config in configs for leaf in _each(config)]
        names = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in each))
        raise ConfigError(
            f"data={shown(data)}: {names or 'the configuration'} needs no calibration data, which would have "
            "no effect; leave data out, or use a configuration that needs some"
        )
    if not isinstance(data, Seen):
        return batches_of(data, how.partition("(")[0])
    for leaf in needing:
        if registry.model_transform_for(type(leaf)) is not None:
            raise ConfigError(
                f"data={shown(data)}: {type(leaf).__name__} traces the model; pass batches"
            )
    return data


def _needs(leaf: Config) -> bool:
    """Whether it needs data: statistics of it, or inputs by which a model is traced and proven."""
    return algorithm_of(leaf) is not None or registry.model_transform_for(type(leaf)) is not None


def _each(config: Config) -> list[Config]:
    if not isinstance(config, FqnToConfig):
        return [config]
    return [each for _, each in config.entries if each is not None]


def joined(
    configs: Sequence[Config], before: Sequence[Report], reports: Sequence[Report]
) -> Report:
    """One report of configurations that were applied one after the other.

    A parameter's record is the last one that changed it, with the bytes that it had before the first and the
    notes of all. The configuration of several is {"sequence": [those of all]}.

    Args:
        configs: as they were given.
        before: of transforms of the model, whose records count where nothing was quantized.
        reports: of what quantized weights.
    """
    every = [*before, *reports]
    if len(every) == 1:
        return every[0]
    config: dict[str, Any] = {SEQUENCE: [report.config for report in every]}
    if len(configs) == 1:
        config = config_to_dict(configs[0])
    all_of, some_of = _by_name(every), _by_name(reports or before)
    records = [_joined(some_of[r.fqn], all_of[r.fqn]) for r in every[-1].records]
    calibration = "; ".join(report.calibration for report in reports if report.calibration)
    return Report(config, tuple(records), calibration)


def _by_name(reports: Sequence[Report]) -> dict[str, list[ParameterRecord]]:
    found: dict[str, list[ParameterRecord]] = {}
    for report in reports:
        for record in report.records:
            found.setdefault(record.fqn, []).append(record)
    return found


def _joined(
    records: Sequence[ParameterRecord], every: Sequence[ParameterRecord]
) -> ParameterRecord:
    ranks = {"unchanged": 0, "skipped": 1, "changed": 2}
    last = max(reversed(records), key=lambda record: ranks[record.status])
    return replace(
        last,
        bytes_before=every[0].bytes_before,
        seconds=sum(record.seconds for record in every),
        note="; ".join(dict.fromkeys(record.note for record in every if record.note)),
    )


def check_useful(config: Config, report: Report, before: Sequence[Report]) -> None:
    """Raise where a configuration came after others that have quantized what it is for.

    Raises:
        ConfigError: it changed nothing for that reason.
    """
    done = [r for r in report if r.status == "unchanged" and r.reason.startswith(QUANTIZED)]
    if before and done and not report.with_status("changed"):
        raise ConfigError(
            f"config={shown(config)} would change nothing: {done[0].fqn} is quantized already, as all that "
            "it is for; put it before the configuration that quantizes, or leave it out"
        )
