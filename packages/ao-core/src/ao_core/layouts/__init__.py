"""Layouts: the built-in ones, and the base class that plugins derive theirs from."""

from __future__ import annotations

from ao_core.layouts.base import (
    SHARED,
    Geometry,
    Layout,
    PartAxis,
    Parts,
    Quantizer,
    grid_axes,
    make_parts,
    too_wide,
)
from ao_core.layouts.digits import Digits
from ao_core.layouts.flat import Flat
from ao_core.layouts.forms import Form, check_spec, forms_of, unlike
from ao_core.layouts.int4_cpu import Int4Cpu
from ao_core.layouts.packed import Packed
from ao_core.layouts.plain import Plain
from ao_core.layouts.values import has_foreign_zeros, scale_values, zero_values

__all__ = [
    "BUILTIN_LAYOUTS",
    "SHARED",
    "Digits",
    "Flat",
    "Form",
    "Geometry",
    "Int4Cpu",
    "Layout",
    "Packed",
    "PartAxis",
    "Parts",
    "Plain",
    "Quantizer",
    "check_spec",
    "forms_of",
    "grid_axes",
    "has_foreign_zeros",
    "make_parts",
    "scale_values",
    "too_wide",
    "unlike",
    "zero_values",
]

BUILTIN_LAYOUTS: tuple[Layout, ...] = (Plain(), Packed(), Digits(), Flat(), Int4Cpu())
