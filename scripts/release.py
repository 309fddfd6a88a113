"""Release one package: `python scripts/release.py ao-core 0.2.0`.

Everything happens in a fresh clone of HEAD: the changelog is assembled, the version written, the
wheel and sdist built and checked, the commit made and tagged. A rehearsal (the default) stops
there and shows it; `--execute` then brings commit, tag and distributions into this work tree.
Nothing is pushed or uploaded. Whatever fails leaves the work tree as it was.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.version import InvalidVersion, Version

from check_dist import dist_problems
from workspace import ROOT, git, last_tag, packages, read_version, version_file


class ReleaseError(Exception):
    """The package cannot be released like this; says why and what would work."""


def run(*command: str, root: Path) -> None:
    """Run a command there; its output is shown only when it fails."""
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def check(name: str, version: str, root: Path) -> Path:
    """The folder of the package, once name, version, work tree and fragments are in order."""
    known = {path.name: path for path in packages(root)}
    if name not in known:
        raise ReleaseError(f"package={name!r} is unknown; known: {', '.join(known)}")
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise ReleaseError(f"version={version!r} is not a version such as 0.2.0") from None
    if str(wanted) != version:
        raise ReleaseError(f"version={version!r}: write it as {wanted}")
    tag = last_tag(name, root)
    if tag is not None and wanted <= Version(tag.removeprefix(f"{name}-v")):
        raise ReleaseError(f"version={version!r} is not newer than the last tag, {tag}")
    package = known[name]
    if wanted < Version(read_version(package)):
        raise ReleaseError(
            f"version={version!r} is older than the source's {read_version(package)}"
        )
    if git("status", "--porcelain", root=root):
        raise ReleaseError("the work tree has changes; commit them first")
    if not any(path.name != "README.md" for path in (package / "changes").glob("*.md")):
        raise ReleaseError(f"packages/{name}/changes has no fragment, so there is nothing to tell")
    return package


def clone(root: Path, into: Path) -> None:
    """Clone the work tree's repository with its tags, and carry over who commits."""
    run("git", "clone", "--quiet", str(root), str(into), root=root)
    for key, fallback in (("user.name", "ao release"), ("user.email", "release@ao.invalid")):
        value = subprocess.run(
            ["git", "-C", str(root), "config", key], capture_output=True, text=True, check=False
        ).stdout.strip()
        git("config", key, value or fallback, root=into)


def make_release(package: Path, version: str, root: Path, dist: Path) -> str:
    """Changelog, version, distributions, commit and tag, in a repository; returns the tag."""
    name, tag = package.name, f"{package.name}-v{version}"
    run(sys.executable, "-m", "towncrier", "build", "--yes", "--version", version,
        "--config", str(package / "pyproject.toml"), "--dir", str(package), root=root)  # fmt: skip
    about = version_file(package)
    text = about.read_text(encoding="utf-8")
    about.write_text(
        text.replace(f'__version__ = "{read_version(package)}"', f'__version__ = "{version}"'),
        encoding="utf-8",
    )
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(package),
        root=root)  # fmt: skip
    count, problems = dist_problems(dist)
    if problems or count != 2:
        raise ReleaseError("\n".join([f"{count} distributions were built", *problems]))
    git("add", "--all", str(package), root=root)
    git("commit", "--quiet", "--message", f"Release {name} {version}", root=root)
    git("tag", "--annotate", tag, "--message", f"{name} {version}", root=root)
    return tag


def release(name: str, version: str, *, root: Path = ROOT, execute: bool = False) -> str:
    """Rehearse a release of one package, and carry it out if told to; returns the tag.

    Raises:
        ReleaseError: something is not in order; the work tree is as it was.
    """
    package = check(name, version, root)
    with tempfile.TemporaryDirectory() as scratch:
        copy, dist = Path(scratch) / "clone", Path(scratch) / "dist"
        clone(root, copy)
        tag = make_release(copy / package.relative_to(root), version, copy, dist)
        print(git("show", "--stat", "--format=%s", "HEAD", root=copy))
        for path in sorted(dist.iterdir()):
            print(f"{path.name}: {path.stat().st_size} bytes, checked")
        if execute:
            git("pull", "--quiet", "--ff-only", "--no-tags", str(copy), "HEAD", root=root)
            git("fetch", "--quiet", str(copy), f"refs/tags/{tag}:refs/tags/{tag}", root=root)
            shutil.copytree(dist, root / "dist", dirs_exist_ok=True)
    return tag


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Release one package; rehearses by default.")
    parser.add_argument("package", help="its folder in packages/, such as ao-core")
    parser.add_argument("version", help="such as 0.2.0")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="rehearse only (the default)")
    mode.add_argument("--execute", action="store_true", help="also commit and tag here")
    options = parser.parse_args()
    try:
        made = release(options.package, options.version, execute=options.execute)
    except ReleaseError as error:
        sys.exit(f"error: {error}")
    print(f"{made}: {'done; push the branch and the tag' if options.execute else 'rehearsed only'}")
