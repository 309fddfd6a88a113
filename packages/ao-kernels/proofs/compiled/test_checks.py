"""Every kernel, compiled ahead of time, keeps its limits."""

from __future__ import annotations

import re

import pytest

from ao_triton_checks.aot import compile_for
from ao_triton_checks.limits import counted_loop, per_unit, violations
from kernel_checks import CHECKS, w4a8

#: checks of kernels that others check in every change, at another size or in another format
MORE = (
    *("int4 g128 rows 32", "int4 g128 rows 128", "nf4 g64 rows 16", "f4e2m1 g32 rows 16"),
    *("sm_90 adam f8e4m3 bf16", "sm_90 f4e2m1 b32 e8m0 bf16", "sm_90 amax row bf16 and transposed"),
    "sm_90 cast f8e4m3 block bf16 and transposed",
    "e4m3 × e4m3 scales row × row bf16 tile 64 × 32",
    "int8 × int8 scales row × row bf16 tile 128 × 256",
    *("uint8 × int4 g128 rows 128", "f8e4m3 × int4 g128 rows 16", "sm_90 bsr 16 bf16 rows 16"),
    *(
        "sm_90 hadamard bf16 28x512",
        "sm_90 attend k8v4 bf16 rows 4",
        "sm_90 attend kv_fp8 bf16 rows 4",
    ),
)


def param(check):
    """A check, with its name."""
    return pytest.param(check, id=check.name, marks=pytest.mark.slow if check.name in MORE else ())


def test_no_check_is_left_out_that_is_not_there():
    assert set(MORE) < {check.name for check in CHECKS}


@pytest.mark.parametrize("check", [param(check) for check in CHECKS])
def test_check(check, record_property):
    build = check.build()
    compiled = compile_for(build)
    loop = counted_loop(check, compiled)
    used = compiled.resources
    if loop is not None and check.work:
        record_property("per_unit", round(per_unit(check, build, loop), 2))
    record_property("registers", used.registers)
    record_property("shared", used.shared)
    found = violations(check, build, compiled)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "prefetches"),
    [
        ("int4 g128 rows 16", True),
        ("uint4 g64 zero rows 16", True),
        ("sm_90 rows plain f8e4m3 bf16 K 4096", False),
        ("e4m3 × e4m3 scales row × row bf16 tile 128 × 256", False),
    ],
)
def test_a_kernel_that_starts_early_waits_before_it_reads(name, prefetches):
    """Programmatic dependent launch: what the kernel before writes is there only after `ACQBULK`."""
    check = next(check for check in CHECKS if check.name == name)
    names = [instruction.name for instruction in compile_for(check.build()).code]
    reads = [names.index(load) for load in ("LDG", "LDGSTS", "UTMALDG") if load in names]
    assert names.index("PREEXIT") < names.index("ACQBULK") < min(reads)
    if prefetches:
        assert names.index("PREEXIT") < names.index("CCTL") < names.index("ACQBULK")


def test_zero_points_are_brought_nearer_as_scales_are():
    """One prefetch for words, scales and zero points of each of four tiles: none is loaded cold."""
    name = "int8 × int4 g64 zero rows 16"
    (check,) = (check for check in w4a8.CHECKS if check.name == name)
    code = compile_for(check.build()).code
    assert sum(each.opcode.startswith("CCTL.E.PF2") for each in code) == 3 * 4


@pytest.mark.parametrize("check", [param(check) for check in w4a8.CHECKS])
def test_four_neighbours_of_a_row_are_in_one_register(check):
    """What `Plane32` is made for; which numbers meet in one text is for the compiler to choose."""
    lines = compile_for(check.build()).ttgir.splitlines()
    (text,) = (line for line in lines if "elementwise_inline_asm" in line and "x32xi32" in line)
    layout = text.partition("x32xi32, ")[2]
    if (name := re.match(r"#\w+(?=[,>])", layout)) is not None:
        (layout,) = (line for line in lines if line.startswith(f"{name[0]} = "))
    assert re.search(
        r"register = \[\[0, 1\], \[0, 2\],|kWidth = 4|sizePerThread = \[1, 4\]", layout
    )
