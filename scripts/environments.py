"""The virtual environments of the nox sessions, packages built in them, names for contents of files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tarfile
import zipfile
from itertools import chain
from pathlib import Path
from typing import Any

import nox
from packaging.requirements import Requirement

from workspace import ROOT

__all__ = [
    "CONSTRAINTS", "ONE_THREAD", "Environment", "benchmarks", "build_packages", "compiled", "digest_of",
    "group", "run_benchmarks", "same_numbers", "sanitized", "siblings_of", "tracked", "without_sources",
]  # fmt: skip

CONSTRAINTS = ROOT / "constraints.txt"
BENCH_RESULTS = ROOT / "build" / "bench"
#: pytest-xdist uses every core already; tests look at what is imported, so torch loads no ao-hf-autoload
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


class Environment:
    """A virtual environment that several sessions share, installed into only when it is stale."""

    def __init__(
        self,
        session: nox.Session,
        name: str,
        python: str = sys.executable,
        below: Environment | None = None,
    ) -> None:
        """Make it if it is not there; it sees what is in `below` too, behind its own."""
        self.session = session
        self.home = ROOT / ".nox" / name
        self.bin = self.home / ("Scripts" if os.name == "nt" else "bin")
        if (self.home / "pyvenv.cfg").exists():
            return
        # pip takes seconds to install, and is seen below
        options = ["--without-pip"] if below else []
        session.run(python, "-m", "venv", *options, str(self.home), external=True)
        if below:
            line = f"import site; site.addsitedir({str(below.packages())!r})\n"
            (self.packages() / "below.pth").write_text(line, encoding="utf-8")

    def packages(self) -> Path:
        """The folder that pip installs into."""
        script = "import sysconfig; print(sysconfig.get_path('purelib'))"
        told = self.session.run(self.bin / "python", "-c", script, silent=True, external=True)
        return Path(str(told).strip())

    def python(self, *args: str | Path, env: dict[str, str] | None = None) -> None:
        """Run this environment's Python with its scripts on PATH."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        command = [str(self.bin / "python"), *map(str, args)]
        self.session.run(*command, env={"PATH": path, **(env or {})}, external=True)

    def install(self, *args: str) -> None:
        """Install under the constraints, unless exactly this was installed before."""
        patterns = (
            *("packages/*/pyproject.toml", "packages/*/src/*/__about__.py"),
            *("packages/*/CMakeLists.txt", "packages/*/cmake/*.*", "packages/*/build_library.py"),
            *("packages/*/cuda_build.py", "packages/*/csrc/**/*.*"),
        )
        files = [CONSTRAINTS, *sorted(chain.from_iterable(map(ROOT.glob, patterns)))]
        stamp = self.home / f"installed-{digest_of(files, *args)}"
        if not stamp.exists():
            self.python("-m", "pip", "install", "-q", "-c", CONSTRAINTS, *args)
            stamp.touch()


def group(*names: str) -> tuple[str, ...]:
    """The requirements of dependency groups of the root pyproject.toml."""
    return nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), *names)


def tracked(session: nox.Session, folder: Path) -> list[Path]:
    """The files of a folder that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", str(folder)]
    listed = str(session.run(*command, silent=True, external=True))
    return sorted(ROOT / name for name in listed.split("\0") if (ROOT / name).is_file())


def digest_of(files: list[Path], *more: str) -> str:
    """One name for the contents of these files, where they are, and these texts."""
    digest = hashlib.sha256("\0".join((sys.version, *more)).encode())
    for path in files:
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def siblings_of(package: str) -> list[str]:
    """The package, the others that it (or its extra `test`) requires, and what those require."""
    names = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    found = [package]
    for name in found:
        project = nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")["project"]
        extra = project["optional-dependencies"]["test"] if name == package else []
        required = {Requirement(line).name for line in [*project["dependencies"], *extra]}
        found += sorted(required & names - set(found))
    return found


def build_packages(env: Environment, out: Path, names: list[str]) -> None:
    """Sdists, and wheels built from them, of these packages in an emptied folder; all are checked.

    What a package's files have given once is kept in build/dist, since C++ takes its minute.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name in names:
        package = ROOT / "packages" / name
        kept = ROOT / "build" / "dist" / f"{name}-{digest_of(tracked(env.session, package))}"
        if not kept.exists():
            part = kept.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            env.python("-m", "build", "--no-isolation", "--outdir", part, package)
            part.rename(kept)
        shutil.copytree(kept, out, dirs_exist_ok=True)
    env.python("scripts/check_dist.py", out)


def compiled(folder: Path) -> tuple[list[Path], str]:
    """The wheels in a folder, and the library that one of them holds, unpacked there."""
    wheels = sorted(folder.glob("*.whl"))
    (wheel,) = (path for path in wheels if not path.name.endswith("-any.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return wheels, archive.extract("ao_kernels/cpu/libao_cpu.so", folder)


def benchmarks(session: nox.Session, pattern: str) -> list[Path]:
    """The benchmark scripts of all packages whose names match."""
    scripts = sorted(ROOT.glob(f"packages/*/benchmarks/{pattern}"))
    if not scripts:
        session.error(f"no benchmark matches packages/*/benchmarks/{pattern}")
    return scripts


def run_benchmarks(env: Environment, scripts: list[Path], *options: str) -> None:
    """Run each script as `SCRIPT --json FILE`; positional arguments are passed on."""
    BENCH_RESULTS.mkdir(parents=True, exist_ok=True)
    for script in scripts:
        package = script.relative_to(ROOT / "packages").parts[0]
        result = BENCH_RESULTS / f"{package}-{script.stem}.json"
        env.python(script, "--json", result, *options, *env.session.posargs)


def without_sources(built: Path, package: str) -> Path:
    """The folder of a package's sdist in `built`, unpacked: what is left of it can only import the wheel."""
    (sdist,) = built.glob(f"{package.replace('-', '_')}-*.tar.gz")
    # an archive that was just built here; Python before 3.11.4 has no filters
    safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(sdist) as archive:
        archive.extractall(built, **safe)
    source = built / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(source / "src")
    return source


def sanitized(session: nox.Session, package: Path, checks: str) -> dict[str, str]:
    """Variables by which Python loads a package's C++ library as it was built for these sanitizers."""
    # Python itself is not built for the sanitizers, so their runtime is loaded first
    runtime = [
        str(session.run("g++", f"-print-file-name={name}", silent=True, external=True)).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    built = package / "build" / f"sanitize-{checks.replace(',', '-')}"
    return {
        "AO_CPU_LIBRARY": str(built / "libao_cpu.so"),
        # torch refuses sizes that no memory has: its error is what the calls expect
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "LD_PRELOAD": " ".join(runtime),
    }


def same_numbers(
    session: nox.Session, environments: dict[str, Environment], out: Path, library: str
) -> None:
    """Fail where one file of ao-kernels' library computes other bits in one environment than in the first."""
    records = []
    for name, env in environments.items():
        result = out / f"{name}.json"
        script = ROOT / "packages" / "ao-kernels" / "tests" / "abi" / "digests.py"
        env.python(script, result, env={"AO_CPU_LIBRARY": library})
        records.append(json.loads(result.read_text(encoding="utf-8")))
        session.log("%s", {key: records[-1][key] for key in ("python", "torch", "isa", "library")})
    expected = records[0]["numbers"]
    for record in records[1:]:
        differing = [case for case, value in record["numbers"].items() if value != expected[case]]
        if differing:
            session.error(f"torch {record['torch']} differs in {len(differing)}: {differing}")
    session.log("%d results, the same bits in all %d environments", len(expected), len(records))
