"""Machine code of NVIDIA GPUs as `cuobjdump -sass` prints it: instructions, loops, counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["ASYNC_LOADS", "Instruction", "Loop", "histogram", "innermost_loop", "loops", "parse"]

#: opcodes that bring data from global memory to shared memory while others go on
ASYNC_LOADS = ("LDGSTS", "UTMALDG", "UBLKCP")

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"\b0x([0-9a-f]+)\b")


class Instruction(NamedTuple):
    """One instruction of a warp."""

    address: int
    #: "@P0", "@!UP1", or empty
    predicate: str
    #: with its modifiers, e.g. "LDGSTS.E.BYPASS.128"
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


class Loop(NamedTuple):
    """The instructions between the target of a branch backwards and the branch, both included."""

    body: tuple[Instruction, ...]

    @property
    def nested(self) -> int:
        """Branches backwards inside the body, beside its own: loops of which the turns are unknown.

        An instruction that waits for a barrier and branches to itself or to the one before is none.
        """
        return sum(
            1
            for instruction in self.body[:-1]
            if (target := _branch_target(instruction)) is not None
            and self.body[0].address <= target < instruction.address - 16
        )


def parse(text: str) -> list[Instruction]:
    """The instructions of the one function in the output of `cuobjdump -sass`."""
    if (count := len(re.findall(r"^\s*Function : ", text, re.MULTILINE))) != 1:
        raise ValueError(f"expected the code of one function, found {count}")
    matches = filter(None, map(_LINE.match, text.splitlines()))
    return [
        Instruction(int(address, 16), predicate or "", opcode, operands.strip())
        for address, predicate, opcode, operands in (match.groups() for match in matches)
    ]


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """All loops, by their branches backwards. The endless branch to itself at the end is none."""
    found = []
    for end, instruction in enumerate(code):
        target = _branch_target(instruction)
        if target is not None and target < instruction.address:
            start = next(i for i, other in enumerate(code) if other.address >= target)
            found.append(Loop(tuple(code[start : end + 1])))
    return found


def innermost_loop(code: Sequence[Instruction], holding: Sequence[str]) -> Loop | None:
    """The shortest loop with one of these opcodes in it."""
    matching = [
        loop
        for loop in loops(code)
        if any(instruction.name in holding for instruction in loop.body)
    ]
    return min(matching, key=lambda loop: len(loop.body), default=None)


def histogram(code: Sequence[Instruction]) -> Counter[str]:
    """How often each opcode stands in the code, without its modifiers."""
    return Counter(instruction.name for instruction in code)


def _branch_target(instruction: Instruction) -> int | None:
    if instruction.name != "BRA":
        return None
    targets = _TARGET.findall(instruction.operands)
    return int(targets[-1], 16) if targets else None
