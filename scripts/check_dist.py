"""Check built sdists and wheels: `python scripts/check_dist.py dist`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename

from workspace import finish

#: what an sdist may hold, relative to its top folder
SDIST_ALLOWED = (
    *("src/", "tests/", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md"),
    *("pyproject.toml", ".gitignore", "csrc/", "CMakeLists.txt", "cmake/", "build_library.py"),
    *("cuda_build.py", "checks/", "conftest.py"),
)
#: folders of development, which no wheel holds; ao_core.testing is what plugins are tested with
DEVELOPMENT = {"benchmarks", "checks", "gates", "proofs", "testing", "tests"}
#: of a wheel with compiled libraries
MOST_BYTES = 5_000_000
METADATA_REQUIRED = ("Summary", "License-Expression", "Requires-Python", "Author", "Description")


def metadata_problems(text: str, version: str) -> list[str]:
    """One sentence for each field of the core metadata that is missing or wrong."""
    message = Parser().parsestr(text)
    body = message["Description"] or message.get_payload()
    fields = {**dict(message.items()), "Description": body}
    problems = [f"metadata has no {key}" for key in METADATA_REQUIRED if not fields.get(key)]
    if message["Description-Content-Type"] != "text/markdown":
        problems.append("the long description is not declared as text/markdown")
    if message["Version"] != version:
        problems.append(f"metadata says version {message['Version']}")
    return problems


def wheel_problems(path: Path) -> list[str]:
    """One sentence for each thing wrong with a wheel."""
    name, version, _, _ = parse_wheel_filename(path.name)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        problems = metadata_problems(archive.read(f"{info}/METADATA").decode(), str(version))
        about = archive.read(f"{module}/__about__.py").decode()
    if f'__version__ = "{version}"' not in about:
        problems.append(f"{module}/__about__.py has another version")
    needed = (f"{module}/__init__.py", f"{module}/py.typed", f"{info}/licenses/LICENSE")
    problems += [f"{needle} is missing" for needle in needed if needle not in names]
    foreign = sorted(n for n in names if not n.startswith((f"{module}/", f"{info}/")))
    foreign += sorted(
        n
        for n in names
        if n.startswith(f"{module}/")
        and not n.startswith("ao_core/testing/")
        and DEVELOPMENT.intersection(Path(n).parts[1:-1])
    )
    problems += [f"{n} does not belong into the wheel" for n in foreign]
    return problems


def library_problems(path: Path) -> list[str]:
    """One sentence for each thing wrong with a wheel of a package that compiles C++."""
    _, _, _, tags = parse_wheel_filename(path.name)
    with zipfile.ZipFile(path) as archive:
        libraries = [name for name in archive.namelist() if name.endswith((".so", ".dylib"))]
    if len(libraries) != 1:
        return [f"it holds {len(libraries)} compiled libraries, expected one"]
    found = {f"{tag.interpreter}-{tag.abi}" for tag in tags}
    if found != {"py3-none"} or any(tag.platform == "any" for tag in tags):
        names = ", ".join(sorted(map(str, tags)))
        return [f"its tags are {names}, expected py3-none and a platform"]
    if (size := path.stat().st_size) > MOST_BYTES:
        return [f"it has {size:,} bytes, at most {MOST_BYTES:,} are allowed"]
    return []


def has_sources(path: Path) -> bool:
    """Whether an sdist holds C++ to compile."""
    with tarfile.open(path) as archive:
        return any("/csrc/" in name for name in archive.getnames())


def sdist_problems(path: Path) -> list[str]:
    """One sentence for each thing wrong with an sdist."""
    name, version = parse_sdist_filename(path.name)
    module = name.replace("-", "_")
    with tarfile.open(path) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
        file = archive.extractfile(f"{module}-{version}/PKG-INFO")
        problems = metadata_problems(file.read().decode() if file else "", str(version))
    needed = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", f"src/{module}/py.typed")
    problems += [f"{needle} is missing" for needle in needed if needle not in names]
    if not any(n.startswith("tests/") and "/test_" in f"/{n}" for n in names):
        problems.append("it holds no tests")
    foreign = sorted(n for n in names if n and not n.startswith(SDIST_ALLOWED))
    problems += [f"{n} does not belong into the sdist" for n in foreign]
    return problems


def dist_problems(folder: Path) -> tuple[int, list[str]]:
    """How many distributions the folder holds, and one sentence for each thing wrong there."""
    problems: list[str] = []
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    for path in wheels:
        problems += [f"{path.name}: {problem}" for problem in wheel_problems(path)]
    for path in sdists:
        problems += [f"{path.name}: {problem}" for problem in sdist_problems(path)]
    compiled = {parse_sdist_filename(path.name) for path in sdists if has_sources(path)}
    for path in wheels:
        if parse_wheel_filename(path.name)[:2] in compiled:
            problems += [f"{path.name}: {problem}" for problem in library_problems(path)]
    if not wheels or len(wheels) != len(sdists):
        problems.append(f"{folder}: {len(wheels)} wheels and {len(sdists)} sdists")
    return len(wheels) + len(sdists), problems


if __name__ == "__main__":
    count, found = dist_problems(Path(sys.argv[1]))
    sys.exit(finish(found, f"{count} distributions"))
