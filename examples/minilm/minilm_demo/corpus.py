"""Pairs of texts for retrieval, drawn from the docstrings of the Python standard library."""

from __future__ import annotations

import ast
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: folders of tests, generated tables and third-party code
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings"}
#: the end of a sentence: a full stop before white space and a capital, or the end of the paragraph
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(])|\n\s*\n")
_MIN_QUERY_WORDS = 4
_MIN_DOCUMENT_WORDS = 8
_MAX_PER_MODULE = 24
_WITH_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


class Pair(NamedTuple):
    """The first sentence of a docstring, the rest of it, and whose it is."""

    query: str
    document: str
    name: str


def sources() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def docstring_pairs(count: int, root: Path | None = None) -> list[Pair]:
    """`count` pairs spread evenly over the library in order of name: the same in every process.

    Pairs whose query or document occurred before are left out, and so are all of a module's beyond
    its first few, so that no module dominates.

    Args:
        count: how many.
        root: folder of Python sources; by default the standard library.

    Raises:
        ValueError: there are fewer.
    """
    root = sources() if root is None else root
    found = list(_distinct(root))
    if len(found) < count:
        raise ValueError(f"count={count}, but {root} has only {len(found)} usable docstrings")
    return [found[index * len(found) // count] for index in range(count)]


def separate_pairs(count: int) -> tuple[list[Pair], list[Pair]]:
    """Twice `count` pairs, one half to calibrate on and one to measure.

    Every other pair goes to each, because neighbours come from the same files: neither half has subjects of
    its own.
    """
    pairs = docstring_pairs(2 * count)
    return pairs[::2], pairs[1::2]


def split_docstring(text: str) -> tuple[str, str]:
    """The first sentence and the rest, white space made single."""
    first, *rest = _SENTENCE_END.split(text.strip(), maxsplit=1)
    return " ".join(first.split()), " ".join(" ".join(rest).split())


def _distinct(root: Path) -> Iterator[Pair]:
    seen: set[str] = set()
    for path in sorted(_modules(root), key=lambda path: path.relative_to(root).as_posix()):
        module = path.relative_to(root)
        taken = 0
        for name, docstring in _docstrings(path):
            query, document = split_docstring(docstring)
            short = len(query.split()) < _MIN_QUERY_WORDS
            if short or len(document.split()) < _MIN_DOCUMENT_WORDS or {query, document} & seen:
                continue
            seen |= {query, document}
            yield Pair(query, document, f"{'.'.join(module.with_suffix('').parts)}:{name}")
            taken += 1
            if taken == _MAX_PER_MODULE:
                break


def _modules(root: Path) -> Iterator[Path]:
    """The Python files below a folder; what is left out is not looked into, since it can be large."""
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Name and docstring of everything in a file that has one, in order of the source."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old sources
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
            yield getattr(node, "name", "module"), docstring
        # those that hold statements, which expressions do not: one node in thirty
        nested = (child for name in node._fields for child in _list(getattr(node, name, None)))
        nodes += (child for child in nested if isinstance(child, _WITH_STATEMENTS))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
