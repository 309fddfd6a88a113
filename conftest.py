"""What pytest does in the whole workspace: seeds every test, and lets no test write among the sources.

Of large grids it runs diagonals, see scripts/grids.py.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest

# pytest has another configuration file where a plugin is tested; then scripts/ is not on the path
sys.path.append(str(Path(__file__).parent / "scripts"))

from grids import pytest_addoption, pytest_collection_modifyitems

__all__ = ["pytest_addoption", "pytest_collection_modifyitems"]


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


# no test reaches for a hub; libraries read this when they are imported
os.environ["HF_HUB_OFFLINE"] = "1"

#: other values draw other random inputs in every test: `AO_TEST_SEED=1 python3 -m nox -s tests`
_SEED = os.environ.get("AO_TEST_SEED", "0")


def _seed(name: str) -> None:
    """Seed by name, so that a test draws the same inputs in whatever order and process it runs."""
    seed = zlib.crc32(f"{_SEED} {name}".encode())
    random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """Seed what a module draws when it is imported."""
    _seed(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> None:
    """Seed what a fixture draws; one that several tests share may be set up by any of them."""
    _seed(f"{request.fixturename} {getattr(request, 'param_index', 0)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Seed what a test draws."""
    _seed(item.nodeid)


_ROOT = Path(__file__).parent
#: folders of build products, which git ignores; benchmarks keep what they compiled in `build`
_PRODUCTS = ("__pycache__", "build", "dist", "site")


def _listed() -> set[str]:
    """What is in the folder of the workspace, but for hidden files and build products."""
    return {
        name for name in os.listdir(_ROOT) if not name.startswith(".") and name not in _PRODUCTS
    }


def _environment() -> dict[str, str]:
    # pytest, torch, scikit-learn and transformers set these as they go
    theirs = ("PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "KMP_", "TOKENIZERS_PARALLELISM")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)}


#: from before the tests on
_known, _given = _listed(), _environment()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Fail after a test that wrote into the folder of the workspace, or left the environment changed."""
    global _given
    new, now = sorted(_listed() - _known), _environment()
    _known.update(new)
    changed = sorted(name for name, _ in now.items() ^ _given.items())
    _given = now
    if new:
        pytest.fail(f"wrote {', '.join(new)} into {_ROOT}; use tmp_path", pytrace=False)
    if changed:
        pytest.fail(f"left {', '.join(changed)} changed; use monkeypatch", pytrace=False)
