"""Triton kernels compiled ahead of time, for any GPU and on a machine without one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ao_triton_checks import sass

__all__ = ["Build", "Compiled", "Resources", "compile_for"]

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Build:
    """What to compile: a kernel with everything that a launch would fix."""

    #: a `triton.JITFunction`
    kernel: Any
    #: parameter → "*bf16", "i32", …, in the kernel's order; those in `constexprs` may be left out
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    #: compute capability times ten: 80, 89, 90, 100
    arch: int = 90
    num_warps: int = 4
    num_stages: int = 3
    #: parameters whose value, or address, is a multiple of 16, as a launch would find
    aligned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resources:
    """What one thread, or block, of a kernel takes."""

    registers: int
    #: bytes of local memory: what did not fit into registers
    spilled: int
    #: bytes of shared memory of a block
    shared: int


@dataclass(frozen=True)
class Compiled:
    """A kernel in all its stages."""

    ttgir: str
    ptx: str
    resources: Resources
    code: tuple[sass.Instruction, ...]

    @property
    def conversions_in_loops(self) -> list[str]:
        """Layout conversions in loops of the Triton GPU code: each goes through shared memory."""
        return [line.strip() for line in _loop_lines(self.ttgir) if "ttg.convert_layout" in line]


def compile_for(build: Build) -> Compiled:
    """Compile a kernel, and disassemble it.

    Raises:
        ImportError: Triton is not installed.
        triton.CompilationError: the kernel cannot be compiled so.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    constexprs = dict(build.constexprs)
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    if missing := [
        name for name in names if signature[name] == "constexpr" and name not in constexprs
    ]:
        raise ValueError(f"{missing} of {build.kernel.__name__} have neither a type nor a value")
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    kernel = triton.compile(
        ASTSource(build.kernel, signature, constexprs, attrs),
        target=GPUTarget("cuda", build.arch, 32),
        options={"num_warps": build.num_warps, "num_stages": build.num_stages},
    )
    usage, code = _disassemble(kernel.asm["cubin"])
    registers, stack, local = map(int, usage)
    resources = Resources(registers, stack + local, kernel.metadata.shared)
    return Compiled(kernel.asm["ttgir"], kernel.asm["ptx"], resources, tuple(code))


def _disassemble(cubin: bytes) -> tuple[tuple[str, ...], list[sass.Instruction]]:
    """(registers, stack, local) of the kernel as text, and its instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, code = (
            subprocess.run([tool, option, path], check=True, capture_output=True, text=True).stdout
            for option in ("-res-usage", "-sass")
        )
    match = _USAGE.search(usage)
    if match is None:
        raise ValueError(f"cuobjdump tells no resource usage: {usage!r}")
    return match.groups(), sass.parse(code)


def _loop_lines(ttgir: str) -> list[str]:
    """The lines inside `scf.for` and `scf.while`, by their indentation."""
    inside: list[str] = []
    outer: int | None = None
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if outer is not None and line.strip().startswith("}") and indent <= outer:
            if "do {" not in line:
                outer = None
        elif outer is not None:
            inside.append(line)
        elif re.search(r"\bscf\.(for|while)\b", line):
            outer = indent
    return inside
