"""Reports: records, and text for people."""

from __future__ import annotations

from ao_core.report import ParameterRecord
from ao_core.report.text import aligned, left_alone, names, shape_text, size_text

__all__ = [
    "ParameterRecord",
    "aligned",
    "left_alone",
    "names",
    "shape_text",
    "size_text",
]
