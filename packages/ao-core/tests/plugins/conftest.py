"""Distributions faked on disk, and a registry that sees nothing else."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import importlib_metadata
import pytest

import ao_core.plugins
import ao_core.registry
from ao_core.records import DType
from ao_core.registry import Registry

HEADER = """
from ao_core.hookspecs import hookimpl
from ao_core.records import DType, Kernel

def same(x):
    return x

def dtype(name):
    return DType(name, 4, "int", encode=same, decode=same, min=-8, max=7, quant_max=7)
"""


class Site:
    """A folder on sys.path that looks as if packages were installed in it."""

    def __init__(self, folder):
        self.folder = folder
        #: what discovery sees of sys.path
        self.path = [str(folder)]

    def add(
        self,
        dist,
        source="",
        *,
        api="(0, 1)",
        dtypes=(),
        version="1.0",
        requires=(),
        entry_points=None,
    ):
        """Install a distribution of one module: `ao-good` is `ao_good`, its entry point `good`.

        The module has `source`, an `ao_api` hook unless `api` is None, and an `ao_dtypes` hook if
        there are `dtypes` (names) to provide.
        """
        module = dist.replace("-", "_")
        self.write(module, source, api=api, dtypes=dtypes)
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {dist}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        entry_points = entry_points or f"{dist.removeprefix('ao-')} = {module}"
        (info / "entry_points.txt").write_text(f"[ao.plugins]\n{entry_points}\n")

    def write(self, module, source="", *, api="(0, 1)", dtypes=()):
        """Write the module of a distribution, or write it anew."""
        text = HEADER
        if api is not None:
            text += f"\n@hookimpl\ndef ao_api():\n    return {api}\n"
        text += f"\n{source}\n"
        if dtypes:
            text += f"\n@hookimpl\ndef ao_dtypes():\n    return [dtype(n) for n in {dtypes!r}]\n"
        (self.folder / f"{module}.py").write_text(text)
        sys.modules.pop(module, None)


@pytest.fixture
def site(tmp_path, monkeypatch):
    for variable in ("AO_PLUGINS", "AO_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    site = Site(tmp_path)
    # What is really installed beside ao-core must not change the outcome of these tests.
    monkeypatch.setattr(
        importlib_metadata,
        "distributions",
        lambda: importlib_metadata.Distribution.discover(path=site.path),
    )
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == tmp_path:
            del sys.modules[name]


@pytest.fixture
def registry(monkeypatch):
    """A fresh registry, with the number formats int4 and int8, in place of the process's own."""
    builtins = [
        DType(name, 4, "int", encode=abs, decode=abs, min=-8, max=7, quant_max=7)
        for name in ("int4", "int8")
    ]
    fresh = Registry({"dtypes": lambda: builtins})
    monkeypatch.setattr(ao_core.registry, "registry", fresh)
    monkeypatch.setattr(ao_core.plugins, "registry", fresh)
    return fresh


@pytest.fixture
def load(registry):
    """Load the plugins; the warnings must say what the problems say, one for one."""

    def load():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            registry.load_plugins()
        found = registry.loader.problems()
        assert [str(warning.message) for warning in caught] == [str(problem) for problem in found]
        assert all(warning.category is ao_core.plugins.PluginWarning for warning in caught)
        return found

    return load
