"""A cache for a device that there is not."""

from __future__ import annotations

import pytest

from ao_kernels.triton.tuning.store import Device, Store


@pytest.fixture
def store(tmp_path):
    return Store(Device("Some GPU", 90), tmp_path / "cache", tmp_path / "shipped")
