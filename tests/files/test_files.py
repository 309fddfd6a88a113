"""Some hostile files and some kills in every run of the tests; `nox -s hostile` tries thousands."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ao_core.testing.warm import run_python

FOLDER = Path(__file__).parent
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks what may hang or be killed")


@pytest.mark.parametrize(
    ("script", "options"),
    [("hostile.py", ["--cases", 80]), ("kills.py", ["--kills", 6])],
    ids=["hostile files", "kills"],
)
def test_some(script, options):
    done = run_python(FOLDER / script, *options, "--seed", 17, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert re.search(rf"^seed 17: {options[1]} \w+, 0 wrong", done.stdout, re.MULTILINE)
