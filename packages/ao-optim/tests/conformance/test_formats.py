"""The number formats and the layout of optimizer state pass the suites that plugin authors use."""

from __future__ import annotations

from ao_core.testing import DTypeSuite, LayoutSuite
from ao_optim.dtypes import DTYPES

for _record in DTYPES:
    _name = f"Test_{_record.name}"
    globals()[_name] = type(_name, (DTypeSuite,), {"dtype": _record.name})


class TestRank1(LayoutSuite):
    layout = "rank1"
    shapes = ((33, 70), (0, 16), (4, 3, 3, 2))
