"""Fixtures that the tests of several examples share."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest


@pytest.fixture
def few_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are drawn from a part of the standard library: parsing all of it takes seconds."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / "email"
    monkeypatch.setattr("minilm_demo.corpus.sources", lambda: folder)
