"""Parts beside those of the layout, alike for all layouts: of static activations, and of input steps."""

from __future__ import annotations

from ao_core.layouts import Form, Geometry
from ao_core.spec import Spec
from ao_core.tensor.activations import act_axes, act_forms, act_names
from ao_core.tensor.input_steps import step_axes, step_forms, step_names

__all__ = ["beside_axes", "beside_forms", "beside_names"]


def beside_names(spec: Spec) -> tuple[str, ...]:
    """Their names, in a tensor of this format."""
    return (*act_names(spec), *step_names(spec))


def beside_axes(spec: Spec, shape: tuple[int, ...]) -> dict[str, Geometry]:
    """Their geometry, in a tensor of stored `shape`."""
    axes: dict[str, Geometry] = dict.fromkeys(act_names(spec), act_axes(spec, shape))
    return axes | step_axes(spec, shape)


def beside_forms(spec: Spec, shape: tuple[int, ...]) -> dict[str, Form]:
    """Their shapes and dtypes."""
    return act_forms(spec, shape) | step_forms(spec, shape)
