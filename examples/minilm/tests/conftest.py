"""Makes the demo's modules importable."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture
def few_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are drawn from a part of the standard library: parsing all of it takes seconds."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / "email"
    monkeypatch.setattr("minilm_demo.corpus.sources", lambda: folder)
