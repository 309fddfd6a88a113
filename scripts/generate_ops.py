"""Write the ops of the packages of this workspace into the reference, from their records.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from itertools import groupby
from pathlib import Path

from ao_core import Op
from ao_core.ext import registry
from doc_sections import main, project_plugins
from workspace import ROOT

#: characters of a signature in one line
WIDTH = 90
PAGE = ROOT / "docs" / "reference" / "ops.md"


def signature(op: Op) -> str:
    """In one line, or where that is too long with one line per parameter."""
    if len(op.signature) <= WIDTH:
        return op.signature
    parameters = inspect.signature(op.reference).parameters.values()
    lines, starred = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("*")
            starred = True
        lines.append(str(parameter).replace("'", ""))
    result = op.signature.rpartition(") -> ")[2]
    return f"{op.name}(\n" + "".join(f"    {line},\n" for line in lines) + f") -> {result}"


def call_type(op: Op) -> str:
    """Where to import the class from: the package, where that exports it."""
    package, name = op.call.__module__.partition(".")[0], op.call.__name__
    exported = hasattr(import_module(package), name)
    return f"{package if exported else op.call.__module__}.{name}"


def entry(op: Op) -> str:
    """One op: signature, what it computes, its call type."""
    kind = " A conversion: the reference serves it under every pin." if op.is_conversion else ""
    lines = [
        f"### {op.name}",
        f"```text\n{signature(op)}\n```",
        op.doc,
        f"Call type: `{call_type(op)}`.{kind}",
    ]
    return "\n\n".join(lines)


def text() -> str:
    """All ops, by the package that they come from."""
    ops = groupby(registry.ops.values(), key=lambda op: registry.ops.provider(op.name))
    return "\n\n".join(
        f"## {provider}\n\n" + "\n\n".join(map(entry, each)) for provider, each in ops
    )


if __name__ == "__main__":
    os.environ["AO_PLUGINS"] = project_plugins()
    sys.exit(main({(PAGE, "ops"): text()}, Path(__file__).name))
