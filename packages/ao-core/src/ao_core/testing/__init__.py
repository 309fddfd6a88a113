"""The conformance suites: what a number format, layout, kernel, … must do, as pytest classes.

Subclass a suite with one attribute, in a file that pytest collects:

    from ao_core.testing import DTypeSuite

    class TestInt3x(DTypeSuite):
        dtype = "int3x"

or run all suites over all that a distribution registers: ``pytest --ao-provider my-dist``. The
suites ask for what a record declares, never for names. Needs pytest (``ao-core[testing]``);
ml_dtypes and gfloat are used as further oracles where they are installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.lazy import lazy_names

if TYPE_CHECKING:
    from ao_core.testing.algorithms import AlgorithmSuite
    from ao_core.testing.compute import ComputeSuite
    from ao_core.testing.distributions import PluginSuite
    from ao_core.testing.dtypes import DTypeSuite
    from ao_core.testing.kernels import KernelSuite
    from ao_core.testing.layouts import LayoutSuite
    from ao_core.testing.model_transforms import ModelTransformSuite
    from ao_core.testing.optimizers import OptimizerSuite
    from ao_core.testing.scales import ScaleSuite
    from ao_core.testing.transforms import TransformSuite
    from ao_core.testing.trials import KernelCase, OpTrial

# Lazy, because the pytest plugin beside these modules is imported by every run of pytest.
_MODULES = {
    "AlgorithmSuite": "ao_core.testing.algorithms",
    "ComputeSuite": "ao_core.testing.compute",
    "DTypeSuite": "ao_core.testing.dtypes",
    "KernelCase": "ao_core.testing.trials",
    "KernelSuite": "ao_core.testing.kernels",
    "LayoutSuite": "ao_core.testing.layouts",
    "ModelTransformSuite": "ao_core.testing.model_transforms",
    "OpTrial": "ao_core.testing.trials",
    "OptimizerSuite": "ao_core.testing.optimizers",
    "PluginSuite": "ao_core.testing.distributions",
    "ScaleSuite": "ao_core.testing.scales",
    "TransformSuite": "ao_core.testing.transforms",
}

__all__ = [
    "AlgorithmSuite",
    "ComputeSuite",
    "DTypeSuite",
    "KernelCase",
    "KernelSuite",
    "LayoutSuite",
    "ModelTransformSuite",
    "OpTrial",
    "OptimizerSuite",
    "PluginSuite",
    "ScaleSuite",
    "TransformSuite",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
