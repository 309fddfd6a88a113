"""The CUDA kernels, compiled for every device on a machine without one: registers, spills, instructions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ao_triton_checks import sass

PACKAGE = Path(__file__).resolve().parents[2]
sys.path.append(str(PACKAGE))

import cuda_build  # noqa: E402

NVCC = cuda_build.find_nvcc()
OUT = PACKAGE / "build" / "cuda-proofs"
#: registers of a thread: two CTAs of 256 threads share an SM, or one has it
REGISTERS = {8: 128, 16: 128, 32: 255, 64: 255}
_ENTRY = re.compile(
    r"entry function '(?P<name>\w+)' for '\w+'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
#: in every change: what differs in the storage of weights for Hopper, and one for the other devices
_TARGETS = [
    pytest.param(name, target, id=f"{name} {target}", marks=() if quick else pytest.mark.slow)
    for name in cuda_build.STORAGES
    for target in cuda_build.TARGETS
    for quick in [(target == "sm_90" and "g32" not in name) or name == "int4"]
]


def tool(*arguments: str | Path) -> str:
    """What `cuobjdump`, which Triton brings, prints."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([path, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def code_of(cubin: Path, name: str) -> list[sass.Instruction]:
    """The instructions of one kernel."""
    return sass.parse(tool("-sass", "-fun", name, cubin))


@pytest.mark.parametrize(("name", "target"), _TARGETS)
def test_kernels_neither_spill_nor_take_more_registers_than_there_are(name, target):
    cubin = OUT / f"{name}-{target}.cubin"
    told = cuda_build.compile_to(
        NVCC, cubin, cuda_build.STORAGES[name], ("-cubin", f"-arch={target}")
    )
    found = {match["name"]: match for match in _ENTRY.finditer(told)}
    assert set(found) == {
        f"ao_linear_{element}_{rows}"
        for element in ("bf16", "f16")
        for rows in REGISTERS
        if rows < 64 or not cuda_build.STORAGES[name].sums
    }
    for kernel, match in found.items():
        assert match["stack"] == match["stores"] == match["loads"] == "0", kernel
        assert int(match["registers"]) <= REGISTERS[int(kernel.rpartition("_")[2])], kernel


@pytest.mark.parametrize("target", cuda_build.TARGETS)
def test_instructions_of_each_device(target):
    """Weights come in bulk where a device can copy so, and what the kernel before writes is waited for."""
    cubin = OUT / f"int4-{target}.cubin"
    cuda_build.compile_to(NVCC, cubin, cuda_build.STORAGES["int4"], ("-cubin", f"-arch={target}"))
    names = [each.name for each in code_of(cubin, "ao_linear_bf16_8")]
    assert {"HMMA", "LDGSTS"} <= set(names)
    assert not {"I2F", "LDL", "STL", "SHFL.BFLY"} & set(names)
    if target == "sm_80":
        assert not {"UBLKCP", "ACQBULK"} & set(names)
        return
    # the next kernel may start; nothing is read before the kernel in front has ended
    assert (
        names.index("PREEXIT")
        < names.index("ACQBULK")
        < min(names.index("UBLKCP"), names.index("LDGSTS"))
    )
    assert names.index("UBLKPF") < names.index("ACQBULK")
    assert "UCGABAR_ARV" in names


class Case(NamedTuple):
    """A matmul whose loop is counted: what is left of the kernel where its parameters are known."""

    name: str
    storage: str
    element: str
    rows: int
    #: statements about the parameters: scales and zero points, N and K of a CTA
    where: str
    #: most instructions of a warp for 128 bytes of weights; an H200 issues 27.6 while they arrive
    budget: float


_ROW = "p.groups_per_tile = 0; p.scale_type = Number::f32; p.zero = nullptr"
_G128 = "p.groups_per_tile = 2; p.group_shift = 1; p.scale_type = Number::bf16; p.zero = nullptr"
_G64 = "p.groups_per_tile = 4; p.group_shift = 0; p.scale_type = Number::bf16"
COUNTED = (
    Case("int4 g128, 1 row", "int4", "bf16", 8, f"{_G128}; p.n_warps = 1; p.m = 1", 19),
    Case("int4 g128, 8 rows", "int4", "bf16", 8, f"{_G128}; p.n_warps = 2; p.m = 8", 21),
    Case("int4 g128, 16 rows", "int4", "bf16", 16, f"{_G128}; p.n_warps = 4; p.m = 16", 24),
    Case("int4 g128, 32 rows", "int4", "bf16", 32, f"{_G128}; p.n_warps = 8; p.m = 32", 27.6),
    Case("int4 g128, 64 rows", "int4", "bf16", 64, f"{_G128}; p.n_warps = 8; p.m = 64", 38),
    Case("int4 g128, float16", "int4", "f16", 8, f"{_G128}; p.n_warps = 1; p.m = 1", 17),
    Case(
        "uint4 g64, zero points",
        "int4",
        "bf16",
        8,
        f"{_G64}; p.zero_type = Number::u8; p.n_warps = 1; p.m = 1",
        24,
    ),
    Case(
        "uint4 g64, zero points in bfloat16",
        "int4_sums",
        "bf16",
        8,
        f"{_G64}; p.zero_type = Number::bf16; p.n_warps = 1; p.m = 1",
        26,
    ),
    Case(
        "int4 g32", "int4_g32", "bf16", 8, f"{_G64}; p.zero = nullptr; p.n_warps = 1; p.m = 1", 27.6
    ),
    Case("int8 row", "int8", "bf16", 8, f"{_ROW}; p.n_warps = 1; p.m = 1", 14),
    Case("f8e4m3 row", "f8e4m3", "bf16", 8, f"{_ROW}; p.n_warps = 1; p.m = 1", 16),
)


#: those counted in every change
FIRST = (
    "int4 g128, 1 row",
    "int4 g128, 16 rows",
    "uint4 g64, zero points",
    "int8 row",
    "f8e4m3 row",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in FIRST else pytest.mark.slow)
        for case in COUNTED
    ],
)
def test_instructions_of_the_loop(case, record_property):
    cubin, storage = OUT / f"{case.name.replace(' ', '-')}.cubin", cuda_build.STORAGES[case.storage]
    options = ("-cubin", "-arch=sm_90")
    cuda_build.compile_to(NVCC, cubin, storage, options, f"{case.where}; p.stages = 3", case.rows)
    loop = sass.innermost_loop(code_of(cubin, f"ao_linear_{case.element}_{case.rows}"), ["HMMA"])
    # a turn is a piece of 32 of N for each warp
    units = 32 * 2 * storage.plane / 128
    codes = 2 if storage.codes != "Int4" else 4
    products = sass.histogram(loop.body)["HMMA"]
    expected = units * codes / 4 * case.rows / 8 * (1.5 if storage.sums else 1)
    assert products == expected
    per_unit = len(loop.body) / units
    record_property("per_unit", round(per_unit, 1))
    assert per_unit <= case.budget


def test_files_hold_all_devices():
    made = cuda_build.build_images(NVCC, 2)["int4"] if "--all" in sys.argv else OUT / "int4.fatbin"
    if not made.exists():
        options = [
            f"-gencode=arch={each.replace('sm', 'compute')},code={each}"
            for each in cuda_build.TARGETS
        ]
        options += [
            "-fatbin",
            "--compress-mode=size",
            f"-gencode=arch={cuda_build.PTX},code={cuda_build.PTX}",
        ]
        cuda_build.compile_to(NVCC, made, cuda_build.STORAGES["int4"], tuple(options), rows=8)
    assert {f"{target}.cubin" for target in cuda_build.TARGETS} == {
        line.rpartition(".")[0].rpartition(".")[2] + ".cubin"
        for line in tool("-lelf", made).splitlines()
        if line
    }
    assert tool("-lptx", made).count("sm_90.ptx") == 1


def test_the_launch_is_as_the_driver_has_it(tmp_path):
    """`driver.cpp` declares what it uses of cuda.h: the same places and numbers."""
    source = tmp_path / "launch.cpp"
    source.write_text(
        """
#include <cuda.h>
#include "driver.cpp"
using namespace ao::gpu;
#define SAME(mine, theirs) static_assert(offsetof(LaunchConfig, mine) == offsetof(CUlaunchConfig, theirs));
SAME(grid_x, gridDimX) SAME(grid_z, gridDimZ) SAME(block_x, blockDimX) SAME(shared, sharedMemBytes)
SAME(stream, hStream) SAME(attributes, attrs) SAME(count, numAttrs)
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(sizeof(Attribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(Attribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(kClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(kProgrammaticSerialization == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(kMaxDynamicShared == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(kSharedCarveout == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
static_assert(kProcessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kSharedOfProcessor == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
static_assert(kSharedOfCta == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
""",
        encoding="utf-8",
    )
    include = [f"-I{NVCC.parent.parent / 'include'}", f"-I{PACKAGE / 'csrc' / 'cuda'}"]
    subprocess.run(["g++", "-std=c++20", "-fsyntax-only", *include, source], check=True)
