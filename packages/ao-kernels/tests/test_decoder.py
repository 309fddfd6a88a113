"""The kernel of `decoder` on the CPU: the suite, and bits of the ops that it is made of."""

from __future__ import annotations

from ao_core.testing import KernelSuite


class TestDecoder(KernelSuite):
    kernel = "cpu_tiles_decoder"


class TestDecoder8(KernelSuite):
    kernel = "cpu_tiles8_decoder"
