"""Compare each package's public API with its last tag; a break must be announced.

A break is announced by a fragment `changes/*.removal.md` that is not yet part of a release.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from workspace import ROOT, finish, last_tag, module_name, packages


def api_breaks(package: Path, tag: str, root: Path = ROOT) -> list[str]:
    """What griffe reports as broken since the tag, one line each."""
    command = [sys.executable, "-m", "griffe", "check", module_name(package), "--against", tag]
    source = (package / "src").relative_to(root)
    done = subprocess.run(
        [*command, "--search", str(source), "--format", "oneline", "--no-color"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines if done.returncode else []


def api_problems(package: Path, root: Path = ROOT) -> list[str]:
    """One sentence for each break that no fragment announces; says on stdout what was compared."""
    tag = last_tag(package.name, root)
    if tag is None:
        print(f"{package.name}: no tag {package.name}-v* yet, nothing to compare with")
        return []
    breaks = api_breaks(package, tag, root)
    announced = sorted(path.name for path in package.glob("changes/*.removal.md"))
    known = ", ".join(announced) or "nothing"
    print(f"{package.name}: {len(breaks)} breaks since {tag}, announced by {known}")
    if announced:
        return []
    return [f"{package.name}: {line} (add changes/+WHAT.removal.md)" for line in breaks]


if __name__ == "__main__":
    folders = [path for path in packages() if path.name in sys.argv[1:] or not sys.argv[1:]]
    found = [problem for folder in folders for problem in api_problems(folder)]
    sys.exit(finish(found, f"API of {len(folders)} packages"))
