"""Programs of other libraries run as their users run them, offline and on small random models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What these libraries deprecate of each other is theirs to mend."""
    for item in items:
        if item.path.parent == HERE:
            for kind in ("FutureWarning", "DeprecationWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@pytest.fixture(autouse=True)
def _same_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test draws the same random numbers, and leaves those of others alone."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def without_ao_hf(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ao-hf is not installed: transformers does not know ao, and hears of no model."""
    from transformers.quantizers import auto

    import ao_hf.transformers  # noqa: F401  # registers ao now, and not in the middle of a test

    for mapping in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(mapping, "ao", raising=False)
    monkeypatch.setattr("ao_core.outcome._told", [])


transformers.utils.logging.disable_progress_bar()
