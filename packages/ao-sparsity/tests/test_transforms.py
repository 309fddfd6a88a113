"""Every configuration passes the suite that plugin authors use."""

from __future__ import annotations

from ao_core import WeightOnlyConfig
from ao_core.testing import TransformSuite
from ao_sparsity import (
    block_sparse_weight,
    float8_dynamic_activation_float8_semi_sparse_weight,
    int4_weight_only_semi_sparse,
    int8_dynamic_activation_int8_semi_sparse_weight,
    semi_sparse_weight,
)


class TestSemiSparse(TransformSuite):
    config = semi_sparse_weight()
    sqnr_range = (4.0, 16.0)


class TestInt8(TransformSuite):
    config = int8_dynamic_activation_int8_semi_sparse_weight()
    sqnr_range = (1.0, 16.0)


class TestFloat8(TransformSuite):
    config = float8_dynamic_activation_float8_semi_sparse_weight()
    sqnr_range = (1.0, 16.0)


class TestInt4(TransformSuite):
    config = int4_weight_only_semi_sparse(group_size=32)
    sqnr_range = (4.0, 16.0)


class TestBlocks(TransformSuite):
    config = block_sparse_weight(blocksize=8, sparsity=0.5)
    sqnr_range = (1.0, 12.0)


class TestAnyFormat(TransformSuite):
    config = WeightOnlyConfig("uint6", 16, "bfloat16", "int", layout="two_four")
    sqnr_range = (4.0, 16.0)
