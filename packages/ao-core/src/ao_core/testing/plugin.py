"""The pytest plugin: ``pytest --ao-provider DIST`` runs every suite over all that DIST registers.

Loaded by every run of pytest where ao-core is installed, so it imports neither torch nor the suites
before the option is given.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["ProviderModule"]

_SUITES = (
    "algorithm_cases",
    "algorithms",
    "base",
    "compute",
    "distributions",
    "dtypes",
    "input_steps",
    "kernel_codecs",
    "kernel_ops",
    "kernel_rotation",
    "kernels",
    "layout_compile",
    "layout_cuts",
    "layout_state",
    "layout_steps",
    "layout_values",
    "layouts",
    "optimizers",
    "scales",
    "transforms",
    "trials",
)
pytest.register_assert_rewrite(*(f"ao_core.testing.{name}" for name in _SUITES))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --ao-provider."""
    parser.getgroup("ao").addoption(
        "--ao-provider",
        action="append",
        default=[],
        metavar="DIST",
        help="run ao's conformance suites over all that this distribution registers; repeatable. "
        "Without further arguments nothing else is collected.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let this file stand for the providers among the arguments."""
    if not config.getoption("--ao-provider"):
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    if __file__ not in config.args:
        config.args.append(__file__)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Collect the suites of the providers where pytest was pointed to this file."""
    providers = parent.config.getoption("--ao-provider")
    if not providers or module_path != Path(__file__):
        return None
    return ProviderModule.from_parent(parent, path=module_path, nodeid="+".join(providers))


class ProviderModule(pytest.Module):
    """A test module made up on the spot: one class for each record of the providers."""

    def _getobj(self) -> ModuleType:
        from ao_core.testing.providers import suites_of

        module = ModuleType("ao_providers", "Conformance suites of the chosen providers.")
        for provider in self.config.getoption("--ao-provider"):
            for suite in suites_of(provider):
                setattr(module, suite.__name__, suite)
        return module

    def classnamefilter(self, name: str) -> bool:
        """Whatever stands in this module is meant."""
        return True
