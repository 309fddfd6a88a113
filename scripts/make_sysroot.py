"""A folder with Python and torch for Linux on ARM: `python scripts/make_sysroot.py FOLDER`, on Debian.

Packages of Debian come by apt from the mirrors that it is set up with, into the folder alone: nothing of this
system changes. It prints the command of that Python, for `nox -s wheels -- --pythons COMMAND`. PyPI has torch
for ARM with CUDA alone, and none of it is called here: libraries that do nothing, made by zig, stand for
those of NVIDIA.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from elftools.elf.elffile import ELFFile

from workspace import ROOT

#: what torch and its Python are linked with, without what these require
PACKAGES = ("python3", "libstdc++6", "libgomp1", "zlib1g")
#: torch, and what is imported with it and with ao-core
WHEELS = (
    *("torch", "numpy", "typing-extensions", "sympy", "mpmath", "networkx", "jinja2", "fsspec"),
    *("filelock", "markupsafe", "setuptools", "packaging", "pluggy", "safetensors"),
    *("importlib-metadata", "lazy-importer", "platformdirs", "zipp"),
)
#: what names of functions of NVIDIA's libraries begin with
VENDOR = ("cu", "nv", "nccl")
#: of a library
SECTIONS = ("dynamic", "dynsym", "gnu.version", "gnu.version_r")
#: what libraries read of a processor: a Neoverse N1
CORES = os.cpu_count() or 1
MIDR = "0x00000000413fd0c1"
CPU_INFO = """\
processor\t: {number}
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
#: of those wheels
PLATFORM = "manylinux_2_28_aarch64"


def apt(folder: Path, *command: str) -> None:
    """Run apt-get for another machine, with its state in a folder."""
    state = folder / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::State": state,
        "Dir::State::Lists": state / "lists", "Dir::State::status": state / "status", "Dir::Cache": state,
        "Debug::NoLocking": "true", "APT::Sandbox::User": "root", "APT::Install-Recommends": "false",
    }  # fmt: skip
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    subprocess.run(["apt-get", "-q", *options, *command], check=True, stdout=sys.stderr)


class Symbols(NamedTuple):
    """What a shared library defines, and what it needs of others."""

    defined: set[str]
    #: without a version
    undefined: set[str]
    #: library → versions and names of symbols that it must have
    needed: dict[str, set[tuple[str, str]]]


def symbols_of(library: Path) -> Symbols:
    """The symbols of a shared library."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        section: Any = {name: elf.get_section_by_name(f".{name}") for name in SECTIONS}
        tags = section["dynamic"].iter_tags()
        found = Symbols(set(), set(), {})
        for tag in tags:
            if tag.entry.d_tag == "DT_NEEDED":
                found.needed[tag.needed] = set()
        versions = section["gnu.version_r"].iter_versions() if section["gnu.version_r"] else ()
        owners = {
            each.entry.vna_other: (need.name, each.name) for need, all_ in versions for each in all_
        }
        for index, symbol in enumerate(section["dynsym"].iter_symbols()):
            owner = (
                owners.get(section["gnu.version"].get_symbol(index).entry["ndx"])
                if owners
                else None
            )
            if symbol.entry.st_shndx != "SHN_UNDEF":
                found.defined.add(symbol.name)
            elif owner is not None:
                found.needed.setdefault(owner[0], set()).add((owner[1], symbol.name))
            elif symbol.name and symbol.entry.st_info.bind != "STB_WEAK":
                found.undefined.add(symbol.name)
        return found


def stand_in(system: Path, packages: Path) -> None:
    """Make a library for each that torch needs and that is not there: its functions do nothing."""
    folder = system / "usr" / "lib" / "aarch64-linux-gnu"
    libraries = sorted((packages / "torch" / "lib").glob("*.so*"))
    there = {path.name for path in (*libraries, *folder.glob("*"), *system.glob("lib/*/*"))}
    all_ = [symbols_of(path) for path in libraries]
    missing: dict[str, set[tuple[str, str]]] = {}
    for name, needed in (item for symbols in all_ for item in symbols.needed.items()):
        if name not in there:
            missing.setdefault(name, set()).update(needed)
    # of libraries without versions: any may have them all
    lacking = set().union(*(each.undefined for each in all_)) - set().union(
        *(each.defined for each in all_)
    )
    missing[min(missing)] |= {("", name) for name in lacking if name.startswith(VENDOR)}
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu", "-shared"]
    for name, symbols in sorted(missing.items()):
        source, versions = folder.parent / "stand_in.c", folder.parent / "stand_in.map"
        source.write_text("".join(f"void {symbol}(void) {{}}\n" for _, symbol in sorted(symbols)))
        groups: dict[str, str] = {}
        for version, symbol in sorted(symbols):
            if version:
                groups[version] = f"{groups.get(version, '')} {symbol};"
        texts = [f"{version} {{ global:{names} }};\n" for version, names in groups.items()]
        versions.write_text("".join(texts))
        made: list[str | Path] = [source, f"-Wl,-soname,{name}", "-o", folder / name]
        made += [f"-Wl,--version-script={versions}"] if texts else []
        subprocess.run([*compiler, *made], check=True)


def processor(system: Path) -> None:
    """Describe a processor: torch reads these files, and fails over those of another kind."""
    texts = {"proc/cpuinfo": "".join(CPU_INFO.format(number=n) for n in range(CORES))}
    for n in range(CORES):
        place = f"sys/devices/system/cpu/cpu{n}/regs/identification/midr_el1"
        texts[place] = f"{MIDR}\n"
    for name, text in texts.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text, encoding="utf-8")


def main() -> int:
    """Make the folder."""
    folder = Path(sys.argv[1]).resolve()
    system, wheels = folder / "root", folder / "wheels"
    apt(folder, "update")
    apt(folder, "install", "--download-only", "--yes", *PACKAGES)
    for package in sorted((folder / "apt" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, system], check=True)
    python = next(system.glob("usr/bin/python3.[0-9]*"))
    version = python.name.removeprefix("python")
    options: list[str | Path] = [
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        version,
        "-c",
        ROOT / "constraints.txt",
    ]
    options += ["--platform", PLATFORM, "--platform", "manylinux2014_aarch64", "--dest", wheels]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", *options, *WHEELS],
        check=True,
        stdout=sys.stderr,
    )
    packages = system / "usr" / "lib" / "python3" / "dist-packages"
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    stand_in(system, packages)
    processor(system)
    print(f"qemu-aarch64 -L {system} {python}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
