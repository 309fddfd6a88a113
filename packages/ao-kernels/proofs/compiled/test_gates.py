"""Every kernel, compiled ahead of time, keeps its limits."""

from __future__ import annotations

import re

import pytest

from ao_kernels.testing.aot import compile_for
from ao_kernels.testing.gates import counted_loop, per_unit, violations
from ao_kernels.triton.gates import GATES, MORE, plane32


@pytest.mark.parametrize(
    "gate",
    [pytest.param(gate, id=gate.name) for gate in GATES]
    + [pytest.param(gate, id=gate.name, marks=pytest.mark.slow) for gate in MORE],
)
def test_gate(gate, record_property):
    build = gate.build()
    compiled = compile_for(build)
    loop = counted_loop(gate, compiled)
    used = compiled.resources
    if loop is not None and gate.work:
        record_property("per_unit", round(per_unit(gate, build, loop), 2))
    record_property("registers", used.registers)
    record_property("shared", used.shared)
    found = violations(gate, build, compiled)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["sm_90 int4 g128 bf16 scale bf16 rows 16", "sm_90 uint4 g128"])
def test_a_kernel_that_starts_early_waits_before_it_reads(name):
    """Programmatic dependent launch: what the kernel before writes is there only after `ACQBULK`."""
    gate = next(gate for gate in GATES if gate.name.startswith(name))
    names = [instruction.name for instruction in compile_for(gate.build()).code]
    reads = [names.index(load) for load in ("LDG", "LDGSTS") if load in names]
    assert names.index("PREEXIT") < names.index("CCTL") < names.index("ACQBULK") < min(reads)


@pytest.mark.parametrize(
    "gate",
    [
        pytest.param(gate, id=gate.name, marks=() if gate in GATES else pytest.mark.slow)
        for gate in (*plane32.GATES, *plane32.MORE)
    ],
)
def test_four_neighbours_of_a_row_are_in_one_register(gate):
    """What `Plane32` is made for; which numbers meet in one text is for the compiler to choose."""
    lines = compile_for(gate.build()).ttgir.splitlines()
    (text,) = (line for line in lines if "elementwise_inline_asm" in line and "x32xi32" in line)
    layout = text.partition("x32xi32, ")[2]
    if (name := re.match(r"#\w+(?=[,>])", layout)) is not None:
        (layout,) = (line for line in lines if line.startswith(f"{name[0]} = "))
    assert re.search(
        r"register = \[\[0, 1\], \[0, 2\],|kWidth = 4|sizePerThread = \[1, 4\]", layout
    )
