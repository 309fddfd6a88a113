"""Importing a module of ours as soon as a module of another library is imported, and not before.

Libraries of Hugging Face look for no plugins, so ao has to register itself; importing them for that
would take seconds that a program without them should not pay.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["when_imported"]


def when_imported(library: str, module: str) -> None:
    """Import `module` right after `library`: now, where that is imported already.

    Where `module` cannot be imported, a warning says why; the library works as if ao were not there.
    """
    if library in sys.modules:
        _import(module)
        return
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.waiting.setdefault(library, []).append(module)


def _import(module: str) -> None:
    try:
        import_module(module)
    except Exception as error:  # whatever it is, importing the library must not fail for it
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"ao is not registered: {module} failed with {reason}", stacklevel=2)


class _Finder(MetaPathFinder):
    """Finds what others find, and lets it be followed."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[str]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec with a loader that imports ours afterwards; None for all other modules."""
        modules = self.waiting.pop(name, None)
        if modules is None:
            return None
        # it is waited for no longer, so this asks the other finders
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, modules)
        return spec


class _Loader(Loader):
    """The loader of a library's module, and then imports of ours."""

    def __init__(self, own: Loader, modules: Sequence[str]) -> None:
        self.own, self.modules = own, modules

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the library's own loader does."""
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the library's module, then ours."""
        spec = module.__spec__
        if spec is not None:
            spec.loader = self.own
        module.__loader__ = self.own
        self.own.exec_module(module)
        for name in self.modules:
            _import(name)
