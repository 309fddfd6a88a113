"""The suites for all that a distribution registers: what ``pytest --ao-provider`` collects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from ao_core.compute import ComputeWeight
from ao_core.config import Config
from ao_core.layouts import Layout
from ao_core.plugins import plugins, problems
from ao_core.quantize import quantize_
from ao_core.records import DType, Kernel
from ao_core.registry import Table, registry
from ao_core.testing.algorithms import AlgorithmSuite
from ao_core.testing.base import Suite
from ao_core.testing.compute import ComputeSuite
from ao_core.testing.distributions import PluginSuite, same_distribution
from ao_core.testing.dtypes import DTypeSuite
from ao_core.testing.kernels import KernelSuite
from ao_core.testing.layouts import LayoutSuite
from ao_core.testing.model_transforms import ModelTransformSuite
from ao_core.testing.optimizers import OptimizerSuite
from ao_core.testing.scales import ScaleSuite
from ao_core.testing.transforms import TransformSuite

__all__ = ["suites_of"]


def suites_of(provider: str) -> list[type[Suite]]:
    """A subclass of the matching suite for each record of a provider, and one for the plugin itself.

    Raises:
        pytest.UsageError: nothing is registered by that provider; names those that do.
    """
    found = [
        *_named(provider, registry.dtypes, DTypeSuite, "dtype", _has_values),
        *_named(provider, registry.layouts, LayoutSuite, "layout", _converts_anywhere),
        *_named(provider, registry.kernels, KernelSuite, "kernel", _has_trial),
        *_named(provider, registry.scale_methods, ScaleSuite, "scale_method"),
        *_named(provider, registry.optimizers, OptimizerSuite, "optimizer"),
        *_configured(provider),
        *_calibrated(provider),
        *_installed(provider),  # last, when the others have asked what can be asked
    ]
    if not found:
        known = sorted(
            {table.provider(n) for table in registry.tables.values() for n in table.names()}
        )
        notes = "".join(f" {note}" for note in registry.notes())
        raise pytest.UsageError(
            f"--ao-provider={provider}: no such distribution registers anything. "
            f"Providers: {', '.join(known)}.{notes}"
        )
    return found


def _owned(provider: str, table: Table[Any]) -> Iterator[str]:
    return (name for name in table.names() if same_distribution(table.provider(name), provider))


def _installed(provider: str) -> Iterator[type[Suite]]:
    """The suite of the plugin, also where nothing that it registers is in use."""
    known = [each.dist for each in plugins()] + [each.dist for each in problems()]
    if any(same_distribution(dist, provider) for dist in known):
        yield type(f"plugin[{provider}]", (PluginSuite,), {"provider": provider})


def _has_values(dtype: DType) -> bool:
    """Whether codes stand for values; learned ones have none before there is a tensor."""
    return dtype.kind != "codebook"


def _converts_anywhere(layout: Layout) -> bool:
    """Whether weights on the CPU, which the suite has, can be arranged so."""
    return not layout.conversion_devices


def _has_trial(kernel: Kernel) -> bool:
    """Whether anybody has said how its op is tried."""
    return kernel.op in registry.ops and registry.ops.get(kernel.op).trials is not None


def _named(
    provider: str,
    table: Table[Any],
    suite: type[Suite],
    attribute: str,
    wanted: Callable[[Any], bool] = lambda record: True,
) -> Iterator[type[Suite]]:
    for name in _owned(provider, table):
        if wanted(table.get(name)):
            yield type(f"{attribute}[{name}]", (suite,), {attribute: name})


def _configured(provider: str) -> Iterator[type[Suite]]:
    """Recipes, and transforms of which no recipe of the provider makes a configuration."""
    configs: dict[str, Config] = {
        name: registry.recipes.get(name).config for name in _owned(provider, registry.recipes)
    }
    tried = {type(config) for config in configs.values()}
    for name in _owned(provider, registry.transforms):
        transform = registry.transforms.get(name)
        if transform.config_type in tried:
            continue
        try:
            configs[name] = transform.example or transform.config_type()
        except Exception as error:
            yield _without_config("transform", name, error)
    for name, config in configs.items():
        yield type(f"transform[{name}]", (TransformSuite,), {"config": config})
        if _trains(config):
            yield type(f"compute[{name}]", (ComputeSuite,), {"config": config})


def _calibrated(provider: str) -> Iterator[type[Suite]]:
    for name in _owned(provider, registry.algorithms):
        algorithm = registry.algorithms.get(name)
        try:
            config = algorithm.example or algorithm.config_type()
        except Exception as error:
            yield _without_config("algorithm", name, error)
        else:
            yield type(f"algorithm[{name}]", (AlgorithmSuite,), {"config": config})
    for name in _owned(provider, registry.model_transforms):
        try:
            config = registry.model_transforms.get(name).config_type()
        except Exception as error:
            yield _without_config("transform of models", name, error)
        else:
            yield type(f"model_transform[{name}]", (ModelTransformSuite,), {"config": config})


def _without_config(kind: str, name: str, error: Exception) -> type[Suite]:
    fields = {"record": f"{kind} {name!r}", "error": error}
    return type(f"{kind}[{name}]", (_NoConfig,), fields)


def _trains(config: Config) -> bool:
    """Whether layers with this configuration compute in low precision, and keep their memory."""
    layer = nn.Linear(64, 32)
    try:
        quantize_(layer, config)
    except Exception:  # `TransformSuite` applies it too, and fails
        return False
    return isinstance(layer.weight, ComputeWeight)


class _NoConfig(Suite):
    """In place of `TransformSuite` or `AlgorithmSuite`, where there is no configuration to try."""

    record: str
    error: Exception

    def test_has_a_configuration(self) -> None:
        """The class of configuration can be made without arguments, or the record has an `example`."""
        raise AssertionError(
            f"{self.record}: its configuration cannot be made without arguments, and it has no `example`: "
            f"{type(self.error).__name__}: {self.error}"
        )
