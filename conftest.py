"""What pytest does in the whole workspace: collects quickly, and lets no test write among the sources."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the tests themselves, which stay: it took a third of collecting them.

    Each later full collection would go through them again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


_ROOT = Path(__file__).parent
#: folders of matmuls that git ignores; benchmarks keep what they compiled in `build`
_PRODUCTS = ("__pycache__", "build", "dist", "site")


def _listed() -> set[str]:
    """What is in the folder of the workspace, but for hidden files and matmuls."""
    return {
        name for name in os.listdir(_ROOT) if not name.startswith(".") and name not in _PRODUCTS
    }


#: from before the tests on
_known = _listed()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Fail after a test that wrote a file into the folder of the workspace."""
    new = sorted(_listed() - _known)
    _known.update(new)
    if new:
        pytest.fail(f"wrote {', '.join(new)} into {_ROOT}; use tmp_path", pytrace=False)
