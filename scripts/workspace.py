"""What the scripts of the workspace share: where things are and what git tracks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def git(*args: str, root: Path = ROOT) -> str:
    """The output of a git command, stripped; raises `CalledProcessError` when it fails."""
    command = ["git", "-C", str(root), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def project_files(*patterns: str, root: Path = ROOT) -> list[Path]:
    """Existing files that git tracks or would track (ignored ones are left out)."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns,
                 root=root)  # fmt: skip
    return sorted(path for name in set(listed.split("\0")) if (path := root / name).is_file())


def packages(root: Path = ROOT) -> list[Path]:
    """The folder of each package."""
    return sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))


def module_name(package: Path) -> str:
    """The import name of the package in a folder: ao-core → ao_core."""
    return package.name.replace("-", "_")


def load_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file."""
    return parse_toml(path.read_text(encoding="utf-8"))


def parse_toml(text: str) -> dict[str, Any]:
    """The contents of a TOML document."""
    return tomllib.loads(text)


def version_file(package: Path) -> Path:
    """The file that holds the version of a package, and nothing else."""
    return package / "src" / module_name(package) / "__about__.py"


def read_version(package: Path) -> str:
    """The version of a package as its source says."""
    match = re.search(r'^__version__ = "(.+)"$', version_file(package).read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f'{version_file(package)} has no line `__version__ = "…"`')
    return match[1]


def last_tag(name: str, root: Path = ROOT) -> str | None:
    """The tag of the newest version of a package, `ao-X-vA.B.C`, or None where it has none."""
    prefix = f"{name}-v"
    tags = git("tag", "--list", f"{prefix}*", root=root).splitlines()
    return max(tags, key=lambda tag: Version(tag.removeprefix(prefix)), default=None)


def finish(problems: list[str], checked: str) -> int:
    """Print the problems, or what was checked; the exit status of a check script."""
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(problems)} problems" if problems else f"{checked}: ok")
    return 1 if problems else 0
