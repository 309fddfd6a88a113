"""Check that everything public is documented: names, public methods, fields, constants, and errors.

Public is what `__all__` lists of `ao_core`, `ao_core.testing`, `ao_core.ext` with its modules, and of the
packages beside ao-core:

- Functions, classes and their public methods have docstrings. A method may have that of its base class.
- Constants and type aliases have a comment ``#:``. So do fields of records, unless the docstring of the class
  names them.
- A function or method that raises an error of ao itself names it in its docstring.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from workspace import finish, module_name, packages

__all__ = ["problems_of", "public_modules", "raised", "undocumented"]

#: errors of Python, such as the `AttributeError` of a lazy module, need no words
_BUILTIN = {name for name in dir(builtins) if isinstance(getattr(builtins, name), type)}


def public_modules() -> list[str]:
    """The modules whose `__all__` is public."""
    import ao_core.ext

    doors = [f"ao_core.ext.{each.name}" for each in pkgutil.iter_modules(ao_core.ext.__path__)]
    return [*map(module_name, packages()), "ao_core.ext", *sorted(doors), "ao_core.testing"]


def undocumented(names: list[str]) -> list[str]:
    """One sentence for each public thing of these modules that is not documented."""
    found: dict[str, None] = {}
    for name in names:
        module = import_module(name)
        for public in getattr(module, "__all__", ()):
            found |= dict.fromkeys(problems_of(module, public))
    return list(found)


def problems_of(module: ModuleType, name: str) -> Iterator[str]:
    """What is missing of one public name."""
    value = inspect.unwrap(getattr(module, name)) if callable(getattr(module, name)) else None
    if inspect.isclass(value):
        yield from _problems_of_class(value)
    elif inspect.isfunction(value):
        yield from _problems_of_function(value, value.__qualname__, value.__doc__)
    elif not (name.startswith("__") or inspect.ismodule(getattr(module, name))):
        yield from _problems_of_constant(module, name)


def _problems_of_class(cls: type) -> Iterator[str]:
    where = f"{cls.__module__}.{cls.__qualname__}"
    doc = cls.__dict__.get("__doc__") or ""
    if doc.startswith(f"{cls.__name__}("):
        doc = ""  # `dataclass` wrote it
    if not doc:
        yield f"{where}: it has no docstring"
    if dataclasses.is_dataclass(cls):
        own = [f.name for f in dataclasses.fields(cls) if f.name in inspect.get_annotations(cls)]
        commented = _commented(cls.__module__, cls.__name__)
        for field in own:
            if not (field.startswith("_") or field in commented or _names(doc, field)):
                yield f"{where}.{field}: the field has no comment `#:`, and the docstring does not name it"
    fields = cls.__dict__.get("__dataclass_fields__", {})
    for name, value in vars(cls).items():
        if name.startswith("_") or name in fields:
            continue
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        function = inspect.unwrap(function) if callable(function) else None
        if inspect.isfunction(function) and function.__qualname__.startswith(
            f"{cls.__qualname__}."
        ):
            yield from _problems_of_function(
                function, f"{cls.__qualname__}.{name}", _doc_of(cls, name)
            )


def _doc_of(cls: type, name: str) -> str | None:
    """The docstring of a method, or the first of those that it overrides."""
    docs = (getattr(base.__dict__.get(name), "__doc__", None) for base in cls.__mro__)
    return next(filter(None, docs), None)


def _problems_of_function(function: Any, name: str, doc: str | None) -> Iterator[str]:
    where = f"{function.__module__}.{name}"
    if not doc:
        yield f"{where}: it has no docstring"
        return
    for error in raised(function):
        if not _names(doc, error):
            yield f"{where}: it raises {error}, and the docstring does not say when (Raises:)"


def raised(function: Any) -> list[str]:
    """The errors of ao that a function raises itself, by name."""
    node = _definition(function)
    own = _own_nodes(node) if node else ()
    found = {_error(each.exc) for each in own if isinstance(each, ast.Raise)}
    return sorted(found - _BUILTIN - {""})


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All below a function but for functions within it, which raise when they are called."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _own_nodes(child)


def _error(exc: ast.expr | None) -> str:
    """`ConfigError` of ``raise ConfigError(…)``; empty for what has no name."""
    target = exc.func if isinstance(exc, ast.Call) else exc
    return target.id if isinstance(target, ast.Name) and re.match(r"[A-Z]\w+", target.id) else ""


def _problems_of_constant(module: ModuleType, name: str) -> Iterator[str]:
    owner = _owner(module, name)
    if owner is not None and name not in _commented(owner, ""):
        yield f"{owner}.{name}: it has no comment `#:`"


def _owner(module: ModuleType, name: str) -> str | None:
    """The module that assigns a name, through imports; None where no module of Python does."""
    lazy = cast("dict[str, str]", getattr(module, "_MODULES", {}))
    if name in lazy:
        return _owner(import_module(lazy[name]), name)
    for node in _tree(module.__name__).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _owner(import_module(node.module), alias.name)
    return module.__name__


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse("\n".join(_lines(module)))


@cache
def _lines(module: str) -> list[str]:
    return Path(inspect.getfile(import_module(module))).read_text(encoding="utf-8").splitlines()


@cache
def _commented(module: str, owner: str) -> set[str]:
    """The names that are assigned in a module, or in a class of it, below or beside a comment ``#:``."""
    body: list[ast.stmt] = _tree(module).body
    if owner:
        classes = [
            n for n in ast.walk(_tree(module)) if isinstance(n, ast.ClassDef) and n.name == owner
        ]
        body = classes[0].body if classes else []
    found: set[str] = set()
    lines, above = _lines(module), -1
    for node in body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        before = lines[node.lineno - 2].lstrip() if node.lineno > 1 else ""
        commented = (
            _is_comment(lines, node.lineno - 2)
            or "#:" in lines[node.end_lineno - 1 if node.end_lineno else 0]
        )
        # a comment is for all that follows it without a blank line or another comment
        if commented or (above == node.lineno - 2 and before and not before.startswith("#")):
            found |= {
                t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)
            }
            above = (node.end_lineno or node.lineno) - 1
    return found


def _is_comment(lines: list[str], index: int) -> bool:
    """Whether a comment ends at this line whose first line begins with ``#:``."""
    while index >= 0 and lines[index].lstrip().startswith("#"):
        if lines[index].lstrip().startswith("#:"):
            return True
        index -= 1
    return False


@cache
def _definition(function: Any) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    line = function.__code__.co_firstlineno
    for node in ast.walk(_tree(function.__module__)):
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.name == function.__name__
        ):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == line:
                return node
    return None


def _names(doc: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", doc) is not None


if __name__ == "__main__":
    modules = public_modules()
    sys.exit(finish(undocumented(modules), f"docstrings of {len(modules)} public modules"))
