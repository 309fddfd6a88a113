"""Limits that a compiled kernel keeps: a change that makes it slower or larger breaks one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ao_triton_checks.aot import Build, Compiled
from ao_triton_checks.sass import ASYNC_LOADS, Loop, histogram, innermost_loop

__all__ = ["Check", "counted_loop", "per_unit", "violations"]

#: opcodes of loops that spill, wait for other threads, or use the slow converter of integers
SLOW_IN_LOOPS = ("I2F", "SHFL", "LDL", "STL")


@dataclass(frozen=True)
class Check:
    """Limits of a kernel that is compiled in one way: a static performance regression test."""

    name: str
    #: called when the check runs: a table of checks must not import Triton
    build: Callable[[], Build]
    #: most registers of a thread, most bytes of shared memory of a block
    registers: int
    shared: int
    #: most layout conversions in loops
    conversions: int = 0
    #: the work of one turn of a block's loop, in the unit of `budget`: for matmuls with weights, bytes of
    #: them / 128; 0: the loop is not counted
    work: float = 0
    #: most instructions that all warps of a block issue in the loop for one unit of work
    budget: float = 0
    #: the counted loop is the shortest one that holds one of these opcodes; of a kernel without loops, none
    #: of them, all of it counts
    holding: tuple[str, ...] = ASYNC_LOADS
    #: opcode → how often it stands in the loop: what tells that one turn does the work of `work`
    counts: Mapping[str, int] = field(default_factory=dict)
    #: opcodes that stand in the loop; of those joined by "|", one
    present: tuple[str, ...] = ()
    #: opcodes that stand anywhere in the kernel
    anywhere: tuple[str, ...] = ()
    #: opcodes that do not stand in the loop
    absent: tuple[str, ...] = SLOW_IN_LOOPS


def counted_loop(check: Check, compiled: Compiled) -> Loop | None:
    """The loop that the check counts, or all instructions as one that has a single turn."""
    if not check.holding:
        return Loop(tuple(each for each in compiled.code if each.name != "NOP"))
    return innermost_loop(compiled.code, check.holding)


def per_unit(check: Check, build: Build, loop: Loop) -> float:
    """Instructions that a block's warps issue in a loop for one unit of work."""
    return len(loop.body) * build.num_warps / check.work


def violations(check: Check, build: Build, compiled: Compiled) -> list[str]:
    """One sentence for each limit that the kernel does not keep."""
    used, found = compiled.resources, []
    if used.spilled:
        found.append(f"spills {used.spilled} bytes of registers")
    if used.registers > check.registers:
        found.append(f"takes {used.registers} registers, at most {check.registers} are allowed")
    if used.shared > check.shared:
        found.append(f"takes {used.shared} bytes of shared memory, at most {check.shared}")
    converted = compiled.conversions_in_loops
    if len(converted) > check.conversions:
        found += [f"converts a layout in a loop: {line}" for line in converted]
    everywhere = histogram(compiled.code)
    found += [f"has no {name}" for name in check.anywhere if not everywhere[name]]
    return found + (_loop_violations(check, build, compiled) if check.work else [])


def _loop_violations(check: Check, build: Build, compiled: Compiled) -> list[str]:
    loop = counted_loop(check, compiled)
    if loop is None:
        return [f"has no loop with one of {', '.join(check.holding)}"]
    found = []
    if loop.nested:
        found.append(f"has {loop.nested} loops inside the loop that is counted")
    issued = per_unit(check, build, loop)
    if issued > check.budget:
        found.append(f"issues {issued:.2f} instructions a unit of work, at most {check.budget}")
    counted = histogram(loop.body)
    for name, count in check.counts.items():
        if counted[name] != count:
            found.append(f"has {counted[name]} {name} in its loop, expected {count}")
    found += [
        f"has no {names} in its loop"
        for names in check.present
        if not any(counted[name] for name in names.split("|"))
    ]
    return found + [
        f"has {counted[name]} {name} in its loop" for name in check.absent if counted[name]
    ]
