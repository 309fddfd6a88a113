from __future__ import annotations

import importlib.util
import sys

import pytest

from check_docstrings import problems_of, public_modules, raised, undocumented

MODULE = '''
from dataclasses import dataclass

__all__ = ["LIMIT", "OTHER", "PLAIN", "Base", "Derived", "Record", "bare", "quiet", "tells"]

#: how many
LIMIT = 3
OTHER = 4  #: likewise

PLAIN = 5


class ConfigError(ValueError):
    """An error."""


@dataclass
class Record:
    a: int
    #: commented
    b: int


class Base:
    """Says so."""

    def method(self):
        """Says so."""


class Derived(Base):
    """Says so."""

    def method(self):
        pass

    @property
    def size(self):
        return 1


def bare():
    pass


def quiet(x):
    """Says what, and not when it fails."""
    if x:
        raise ConfigError("x")
    raise ValueError("of Python")


def tells(x):
    """Says both.

    Raises:
        ConfigError: x is wrong.
    """
    def within():
        raise SchemaError("later")
    if x:
        raise ConfigError("x")
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    path = tmp_path / "ao_documented.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("ao_documented", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ao_documented", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "problems"),
    [
        ("LIMIT", []),
        ("OTHER", []),
        ("PLAIN", ["PLAIN: it has no comment `#:`"]),
        (
            "Record",
            [
                "Record: it has no docstring",
                "Record.a: the field has no comment `#:`, and the docstring does not name it",
            ],
        ),
        ("Base", []),
        ("Derived", ["Derived.size: it has no docstring"]),
        ("bare", ["bare: it has no docstring"]),
        ("quiet", ["quiet: it raises ConfigError, and the docstring does not say when (Raises:)"]),
        ("tells", []),
    ],
)
def test_what_is_missing(module, name, problems):
    assert list(problems_of(module, name)) == [f"ao_documented.{each}" for each in problems]


def test_errors_of_functions_within_are_theirs(module):
    assert raised(module.tells) == raised(module.quiet) == ["ConfigError"]


def test_everything_public_is_documented():
    modules = public_modules()
    assert {"ao_core", "ao_core.ext", "ao_core.ext.kernels", "ao_core.testing", "ao_quant"} <= set(
        modules
    )
    assert undocumented(modules) == []
