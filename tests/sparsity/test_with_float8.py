"""Sparse training and matmuls in low precision of one layer: refused in either order."""

from __future__ import annotations

import pytest
from torch import nn

from ao_core import quantize_
from ao_core.ext import ConfigError
from ao_core.ext.quantizing import NothingConvertedWarning
from ao_sparsity import SemiSparseLinear, SupermaskLinear, swap_linear_with_semi_sparse_linear


@pytest.mark.parametrize("layer", [SemiSparseLinear, SupermaskLinear])
def test_either_order(layer: type[nn.Linear]) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    swap_linear_with_semi_sparse_linear(model, {"0": layer})
    with pytest.warns(NothingConvertedWarning, match="swap it back first"):
        report = quantize_(model, "float8/rowwise")
    assert report.records[0].status != "changed"
    assert not report.with_status("changed")
    other = nn.Sequential(nn.Linear(64, 64))
    quantize_(other, "float8/rowwise")
    with pytest.raises(ConfigError, match="its weight is a ComputeWeight"):
        swap_linear_with_semi_sparse_linear(other, {"0": layer})
