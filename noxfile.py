"""Everything a developer or CI runs. `nox -l` lists the sessions, `nox -s NAME` runs one.

Works over whatever stands in packages/. Two environments are shared, because installing torch
takes a minute: `.nox/dev` has torch and all packages in editable form, `.nox/tools` has no torch.
Only sessions that must see less (or other) packages than that have an environment of their own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
from itertools import chain
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True
nox.options.sessions = ["tests", "lint", "types", "imports"]

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMES = [path.name for path in PACKAGES]
SOURCES = os.pathsep.join(str(path / "src") for path in PACKAGES)
DIST = ROOT / "dist"
BENCH_RESULTS = ROOT / "build" / "bench"
#: pytest-xdist already uses every core; torch's own threads would only get in the way
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Environment:
    """A virtual environment that several sessions share, installed into only when it is stale."""

    def __init__(self, session: nox.Session, name: str) -> None:
        self.session = session
        self.home = ROOT / ".nox" / name
        self.bin = self.home / ("Scripts" if os.name == "nt" else "bin")
        if not (self.home / "pyvenv.cfg").exists():
            session.run(sys.executable, "-m", "venv", str(self.home), external=True)

    def python(self, *args: str | Path, env: dict[str, str] | None = None) -> None:
        """Run this environment's Python with its scripts on PATH."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        command = [str(self.bin / "python"), *map(str, args)]
        self.session.run(*command, env={"PATH": path, **(env or {})}, external=True)

    def install(self, *args: str) -> None:
        """Install under the constraints, unless exactly this was installed before."""
        patterns = ("packages/*/pyproject.toml", "packages/*/src/*/__about__.py")
        files = [CONSTRAINTS, *sorted(chain.from_iterable(map(ROOT.glob, patterns)))]
        wanted = [sys.version, *args, *(path.read_text(encoding="utf-8") for path in files)]
        digest = hashlib.sha256("\0".join(wanted).encode()).hexdigest()[:16]
        stamp = self.home / f"installed-{digest}"
        if not stamp.exists():
            self.python("-m", "pip", "install", "-q", "-c", CONSTRAINTS, *args)
            stamp.touch()


def group(*names: str) -> tuple[str, ...]:
    """The requirements of dependency groups of the root pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, *names)


def tools(session: nox.Session, *groups: str) -> Environment:
    """The environment without torch."""
    env = Environment(session, "tools")
    env.install(*group(*groups))
    return env


def dev(session: nox.Session, *groups: str) -> Environment:
    """The environment with torch and every package, editable, with its test requirements."""
    env = Environment(session, "dev")
    env.install(*group("tools"))
    editable = [arg for path in PACKAGES for arg in ("-e", f"{path}[test]")]
    env.install("--no-build-isolation", *editable)
    if groups:
        env.install(*group(*groups))
    return env


def build_packages(env: Environment, out: Path, names: list[str]) -> None:
    """Build sdists, and wheels from them, into an emptied folder; check all."""
    shutil.rmtree(out, ignore_errors=True)
    for name in names:
        env.python("-m", "build", "--no-isolation", "--outdir", out, ROOT / "packages" / name)
    env.python("scripts/check_dist.py", out)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Quantize a real model by every recipe, compare, and write an HTML report."""
    dev(session, "demo").python("examples/minilm/demo.py", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every test of every package, of the examples and of the tooling."""
    env = dev(session, "tests")
    env.python("-m", "pytest", "-n", "2", *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in NAMES])
def tests_isolated(session: nox.Session, package: str) -> None:
    """Tests of one package against its wheel, installed with only what it declares."""
    built = Path(session.create_tmp()).resolve() / "dist"
    build_packages(tools(session, "tools"), built, siblings_of(package))
    wheels = {path.name.split("-")[0].replace("_", "-"): path for path in built.glob("*.whl")}
    extra = [f"{path}[test]" if name == package else str(path) for name, path in wheels.items()]
    session.run("python", "-m", "pip", "uninstall", "-q", "-y", *NAMES)
    session.install("-q", "-c", str(CONSTRAINTS), *extra)

    (sdist,) = built.glob(f"{package.replace('-', '_')}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(built, filter="data")
    source = built / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(source / "src")  # what is left can only import the wheel
    with session.chdir(source):
        session.run("python", "-m", "pytest", "-n", "2", *session.posargs, env=ONE_THREAD)


def siblings_of(package: str) -> list[str]:
    """The package, the others that it (or its extra `test`) requires, and what those require."""
    found = [package]
    for name in found:
        project = nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")["project"]
        extra = project["optional-dependencies"]["test"] if name == package else []
        required = {Requirement(line).name for line in [*project["dependencies"], *extra]}
        found += sorted(required & set(NAMES) - set(found))
    return found


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, file sizes, forbidden texts, and the common shape of the packages."""
    env = tools(session, "lint")
    env.python("-m", "ruff", "check", ".")
    env.python("-m", "ruff", "format", "--check", ".")
    for script in ("check_sizes.py", "check_texts.py", "check_packages.py"):
        env.python(f"scripts/{script}")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy, strict, on the sources of all packages and on the tooling."""
    dev(session, "types").python("-m", "mypy", *session.posargs, env={"MYPYPATH": SOURCES})


@nox.session(venv_backend="none")
def imports(session: nox.Session) -> None:
    """Who may import whom: the contracts of the design, over all packages."""
    env = tools(session, "imports")
    env.python("scripts/check_imports.py", env={"PYTHONPATH": SOURCES})


@nox.session(venv_backend="none")
def api(session: nox.Session) -> None:
    """Breaking changes of each package's public API since its last tag."""
    tools(session, "api").python("scripts/check_api.py", *session.posargs)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Check that generated pages are fresh, then build the site into site/, strictly."""
    env = dev(session, "docs")
    for script in sorted(ROOT.glob("scripts/generate_*.py")):
        env.python(script, "--check")
    env.python("-m", "mkdocs", "build", "--strict", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Benchmarks packages/*/benchmarks/bench_*.py; each writes JSON into build/bench/."""
    scripts = benchmarks(session, "bench_*.py")
    run_benchmarks(dev(session), scripts)


@nox.session(venv_backend="none")
def bench_torchao(session: nox.Session) -> None:
    """Comparisons packages/*/benchmarks/torchao_*.py, in an environment that has torchao too."""
    scripts = benchmarks(session, "torchao_*.py")
    env = Environment(session, "bench_torchao")
    env.install(*group("tools", "torchao"), "torch")
    env.install("--no-build-isolation", *(arg for path in PACKAGES for arg in ("-e", str(path))))
    run_benchmarks(env, scripts)


def benchmarks(session: nox.Session, pattern: str) -> list[Path]:
    """The benchmark scripts of all packages whose names match."""
    scripts = sorted(ROOT.glob(f"packages/*/benchmarks/{pattern}"))
    if not scripts:
        session.error(f"no benchmark matches packages/*/benchmarks/{pattern}")
    return scripts


def run_benchmarks(env: Environment, scripts: list[Path]) -> None:
    """Run each script as `SCRIPT --json FILE`; positional arguments are passed on."""
    BENCH_RESULTS.mkdir(parents=True, exist_ok=True)
    for script in scripts:
        result = BENCH_RESULTS / f"{script.parent.parent.name}-{script.stem}.json"
        env.python(script, "--json", result, *env.session.posargs)


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Wheel and sdist of every package (or of those named) into dist/, checked."""
    build_packages(tools(session, "tools"), DIST, session.posargs or NAMES)


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Release one package: `nox -s release -- ao-core 0.2.0`; rehearses unless told --execute."""
    tools(session, "tools").python("scripts/release.py", *session.posargs)
