"""Public names of a package that are imported when they are first used, so that importing it costs little."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package whose names are defined in other modules.

    A name is looked up once; then it is an attribute of the package like any other. Type checkers see the
    imports below `if TYPE_CHECKING`, which the package has beside this:

        __getattr__, __dir__ = lazy_names(__name__, {"Spec": "ao_core.spec"})

    Args:
        package: the `__name__` of the package, which has `__all__`.
        modules: name -> the module that defines it.
    """
    namespace = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = value = getattr(import_module(modules[name]), name)
        return value

    return find, lambda: sorted(namespace["__all__"])
