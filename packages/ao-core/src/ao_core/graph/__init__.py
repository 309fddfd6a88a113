"""Models as graphs: their operations, and which dimensions of their tensors are the same."""

from __future__ import annotations

from ao_core.graph.analysis import ModelGraph, analyze
from ao_core.graph.axes import Axis, among, atoms, coordinates, find, fix
from ao_core.graph.checking import Transform, outputs, prove, proven, relative_difference
from ao_core.graph.copies import copied, names_of, sharing, tensors_of
from ao_core.graph.export import Inputs, Step, arguments, steps
from ao_core.graph.rotations import (
    Fold,
    OnlineSite,
    RotatedDimension,
    RotationSite,
    keeping_mean,
    rotated,
    rotated_online,
)
from ao_core.graph.scales import ScaledDimension, ScaleGroup, scaled
from ao_core.graph.tracing import Traced, trace

__all__ = [
    "Axis",
    "Fold",
    "Inputs",
    "ModelGraph",
    "OnlineSite",
    "RotatedDimension",
    "RotationSite",
    "ScaleGroup",
    "ScaledDimension",
    "Step",
    "Traced",
    "Transform",
    "among",
    "analyze",
    "arguments",
    "atoms",
    "coordinates",
    "copied",
    "find",
    "fix",
    "keeping_mean",
    "names_of",
    "outputs",
    "prove",
    "proven",
    "relative_difference",
    "rotated",
    "rotated_online",
    "scaled",
    "sharing",
    "steps",
    "tensors_of",
    "trace",
]
