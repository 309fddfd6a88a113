"""The kernel of dense matmuls in the batch-invariant mode, by the conformance suite."""

from __future__ import annotations

from ao_core.testing import KernelSuite


class TestDense(KernelSuite):
    kernel = "cpu_dense_linear"
