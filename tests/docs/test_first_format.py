"""What docs/extending/dtype.md tells its readers to do, done: install a number format, use it, test it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from run_docs import BLOCK, normal, run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending" / "dtype.md"
PACKAGE = ROOT / "docs" / "examples" / "ao_pot4"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables under which the package of the page is installed."""
    target = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index",
         "--no-build-isolation", "--target", str(target), str(PACKAGE)],
        check=True,
    )  # fmt: skip
    path = os.pathsep.join([str(target), *sys.path[1:]])
    return {**os.environ, "PYTHONPATH": path, "AO_PLUGINS": "pot4"}


@pytest.mark.slow
def test_use_prints_what_the_page_says(environment: dict[str, str], tmp_path: Path) -> None:
    printed = normal(run([str(PACKAGE / "use.py")], tmp_path, environment))
    texts = [m["text"] for m in BLOCK.finditer(PAGE.read_text("utf-8")) if m["lang"] == "text"]
    assert printed in map(normal, texts)


@pytest.mark.slow
def test_the_command_lists_it(environment: dict[str, str], tmp_path: Path) -> None:
    printed = run(["-m", "ao_core.cli", "plugins"], tmp_path, environment)
    listed = r"^ao-pot4 0\.1\.0, plugin pot4 in ao_pot4, loaded in [\d.]+ s\n  dtypes \(1\): pot4$"
    assert re.search(listed, printed, re.MULTILINE)


@pytest.mark.slow
def test_conformance(environment: dict[str, str], tmp_path: Path) -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    printed = run([*command, str(PACKAGE / "test_pot4.py")], tmp_path, environment)
    assert "passed" in printed
    printed = run([*command, "--ao-provider", "ao-pot4"], tmp_path, environment)
    assert "passed" in printed
