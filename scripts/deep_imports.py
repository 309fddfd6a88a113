"""Who imports modules of ao_core that are not for others: packages, their tests, examples, docs.

The public doors are `ao_core`, `ao_core.ext` with its families, and `ao_core.testing`. Import-linter holds
the sources of packages to them. This holds everything else that the repository has, programs in strings
and in pages included. Reads files, imports nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from workspace import ROOT, project_files

#: parts of ao_core that others may import, beside its own names
DOOR = ("ext", "testing")
#: files that are about ao_core's own workings, and the parts of it that they may import
INSIDE = {
    # run `python -m ao_core.cli`
    "packages/ao-hf/tests/generation/test_generate_command.py": ("cli",),
    "packages/ao-hf/tests/generation/test_measuring.py": ("cli",),
    # watches what is in memory and stops runs; calls commands
    "packages/ao-hf/tests/transformers/test_calibrated_folders.py": ("checkpoints", "cli"),
    # shrinks pieces
    "packages/ao-hf/tests/transformers/test_calibrated_experts.py": ("checkpoints",),
    "packages/ao-hf/tests/transformers/test_transformed_folders.py": ("checkpoints", "cli"),
    "packages/ao-hf/tests/transformers/test_replays.py": ("cli",),  # calls commands
    "scripts/write_known_names.py": ("known",),  # writes the table of that module
    "tests/docs/test_first_format.py": ("cli",),  # runs `python -m ao_core.cli`
    "tests/files/hostile.py": (
        "checkpoints",
        "cli",
    ),  # shrinks pieces; lets errors of commands through
    "tests/files/kills.py": ("checkpoints",),  # shrinks pieces
    "tests/files/test_quantize_command.py": (
        "checkpoints",
        "cli",
    ),  # fills the disk; calls commands
    "tests/misuse/test_public_arguments.py": ("tensor",),  # misuses the functions for files
    "tests/programs/conftest.py": ("outcome",),  # as if ao-hf were not installed
    "tests/process/test_without_imports.py": ("known",),  # compares that table with the packages
}
#: their strings are sources that break the rules
_EXAMPLES = (
    "tests/docs/test_extending.py",
    "tests/tooling/test_deep_imports.py",
    "tests/tooling/test_imports.py",
)
_STATEMENT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<source>ao_core(?:\.\w+)*)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^#\n]*)"
    r"|import[ \t]+(?P<module>ao_core\.[\w.]+))",
    re.MULTILINE,
)
_DOTTED = re.compile(r"ao_core(\.\w+)+")


class Found(NamedTuple):
    """A name that is imported: `from {module} import {name}`, or `import {module}` without one."""

    line: int
    module: str
    name: str = ""


def doors(core: Path) -> dict[str, str]:
    """Each name that a door exports, and the first door that does."""
    files = {"ao_core": core / "__init__.py", "ao_core.ext": core / "ext" / "__init__.py"}
    files |= {f"ao_core.ext.{path.stem}": path for path in sorted((core / "ext").glob("[!_]*.py"))}
    files["ao_core.testing"] = core / "testing" / "__init__.py"
    found: dict[str, str] = {}
    for door, path in files.items():
        for name in _exported(ast.parse(path.read_text("utf-8"))):
            found.setdefault(name, door)
    return found


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def parts_of(core: Path) -> set[str]:
    """Names of the modules and packages in ao_core."""
    return {path.stem for path in core.iterdir() if path.suffix == ".py" or path.is_dir()}


def imports(path: Path) -> Iterator[Found]:
    """All that a file imports of ao_core, or names as a module of it in a string."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        yield from _in_text(text, 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (Found(node.lineno, node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (Found(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ao_core":
            yield Found(node.lineno, "ao_core", node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _DOTTED.fullmatch(node.value):  # `monkeypatch.setattr("ao_core.dispatch.BANDS", …)`
                yield Found(node.lineno, node.value)
            else:
                yield from _in_text(node.value, node.lineno)


def _in_text(text: str, first: int) -> Iterator[Found]:
    for match in _STATEMENT.finditer(text):
        line = first + text.count("\n", 0, match.start())
        if match["module"]:
            yield Found(line, match["module"])
        else:
            names = (part.split() for part in match["names"].strip("( )\n").split(","))
            yield from (Found(line, match["source"], name[0]) for name in names if name)


def problems(root: Path = ROOT) -> list[str]:
    """One line for each import of a deep module: where it is, and what to write instead."""
    core = root / "packages" / "ao-core" / "src" / "ao_core"
    exported, parts = doors(core), parts_of(core)
    lines = []
    for path in project_files("*.py", "*.md", root=root):
        place = path.relative_to(root).as_posix()
        if place.startswith("packages/ao-core/") or place in _EXAMPLES:
            continue
        allowed = (*DOOR, *INSIDE.get(place, ()))
        for found in imports(path):
            part = _part(found, exported, parts)
            if part and part not in allowed:
                lines.append(f"{place}:{found.line}: {_advice(found, exported)}")
    return lines


def _part(found: Found, exported: dict[str, str], parts: set[str]) -> str:
    """The part of ao_core that is reached into; empty where none is."""
    if found.module == "ao_core":
        return found.name if found.name in parts and exported.get(found.name) != "ao_core" else ""
    base, _, rest = found.module.partition(".")
    part = rest.partition(".")[0]
    return part if base == "ao_core" and part in parts else ""


def _advice(found: Found, exported: dict[str, str]) -> str:
    what = f"{found.module}.{found.name}" if found.name else found.module
    name = found.name or found.module.rpartition(".")[2]
    if door := exported.get(name):
        return f"{what} is inside ao_core; write `from {door} import {name}`"
    return (
        f"{what} is inside ao_core, and no door exports it: ask for the behaviour instead, move the test "
        "to packages/ao-core, or export it from a family of ao_core.ext"
    )
