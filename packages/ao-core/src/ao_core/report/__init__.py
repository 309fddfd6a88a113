"""What `quantize_` did: one record per parameter, totals, and ways to look at them."""

from __future__ import annotations

from ao_core.report.records import ParameterRecord, Report
from ao_core.report.text import aligned, size_text

__all__ = ["ParameterRecord", "Report", "aligned", "size_text"]
