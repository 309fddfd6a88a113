"""Every kernel, compiled ahead of time, keeps its limits."""

from __future__ import annotations

import pytest

from ao_kernels.testing.aot import compile_for
from ao_kernels.testing.gates import counted_loop, per_unit, violations
from ao_kernels.triton.gates import GATES, MORE


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
