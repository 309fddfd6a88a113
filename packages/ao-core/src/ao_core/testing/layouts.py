"""`LayoutSuite`: what a layout must do, or refuse in so many words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ao_core.layouts import Layout
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.testing.base import Suite
from ao_core.testing.layout_compile import LayoutCompile
from ao_core.testing.layout_cuts import LayoutCuts
from ao_core.testing.layout_state import LayoutState
from ao_core.testing.layout_steps import LayoutSteps
from ao_core.testing.layout_values import LayoutValues
from ao_core.testing.samples import SHAPES, SPECS, Sample, fitting_specs

__all__ = ["LayoutSuite"]

#: shapes in which each spec is tried where not all are
AT_ONCE = 2


class LayoutSuite(LayoutValues, LayoutCuts, LayoutState, LayoutSteps, LayoutCompile, Suite):
    """Tests of one layout.

    Every rule of quantized tensors is tried. What the layout's `geometry` declares must give the
    result of the dense op on the dequantized values; anything else must raise `UnsupportedOp`
    naming the op and the layout.

    Attributes:
        layout: its registered name.
        specs: formats to try (their layout is replaced); those it cannot hold are left out.
        shapes: shapes to try; at least one of two dimensions.
    """

    layout: str
    specs: Sequence[Spec] = SPECS
    shapes: Sequence[tuple[int, ...]] = SHAPES

    @property
    def record(self) -> Layout:  # type: ignore[override]
        """The record under test."""
        return registry.layouts.get(self.layout)

    def samples(self) -> list[Sample]:
        """Every spec in every shape that the layout says it can hold."""
        layout = registry.layouts.get(self.layout)
        return [
            Sample(spec, shape)
            for shape in self.shapes
            for spec in fitting_specs(layout, shape, (*self.specs, *layout.examples))
        ]

    argument_names = ("any_sample", "sample", "weight", "weights")

    def arguments(self) -> dict[str, Sequence[Any]]:
        """What fits.

        `any_sample`: all; `sample`: each spec in `AT_ONCE` shapes that take turns, and a weight matrix;
        `weight`: that alone; `weights`: the list of those.
        """
        samples = self.samples()
        by_spec: dict[Spec, list[Sample]] = {}
        for sample in samples:
            by_spec.setdefault(sample.spec, []).append(sample)
        some: list[Sample] = []
        matrices: list[Sample] = []
        for turn, each in enumerate(by_spec.values()):
            found = [s for s in each if len(s.shape) == 2 and s.shape[0] > 1][:1]
            matrices += found
            turns = [each[(turn * AT_ONCE + i) % len(each)] for i in range(AT_ONCE)]
            some += dict.fromkeys(found + turns)
        return {
            "any_sample": samples,
            "sample": some,
            "weight": matrices,
            "weights": [matrices],
        }

    def test_something_fits(self) -> None:
        """The layout holds at least one of `specs` in one weight matrix of `shapes`."""
        assert self.arguments()["weight"], (
            f"layout {self.layout!r} fits none of the specs in any 2-D shape; set `specs` and `shapes`"
        )
