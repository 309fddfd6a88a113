"""Reading the machine code that `cuobjdump -sass` prints."""

from __future__ import annotations

import pytest

from ao_triton_checks.sass import ASYNC_LOADS, histogram, innermost_loop, loops, parse

# an outer loop with asynchronous loads; in it a loop that only computes, and a wait; then a loop of
# plain loads, and the endless branch at the end
CODE = """
\tcode for sm_90a
\t\tFunction : kern
        /*0000*/                   LDC R1, c[0x0][0x28] ;                    /* 0x00000a00ff017b82 */
                                                                             /* 0x000fe20000000800 */
        /*0010*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64], P1 ; /* 0x0 */
        /*0020*/                   FFMA R3, R3, R4, R5 ;                     /* 0x0 */
        /*0030*/              @!P2 BRA 0x20 ;                                /* 0x0 */
        /*0040*/                   FADD R3, R3, 1 ;                          /* 0x0 */
        /*0050*/               @P0 BRA 0x20 ;                                /* 0x0 */
        /*0060*/                   HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR8], R24 ; /* 0x0 */
        /*0070*/               @P0 BRA P3, 0x10 ;                            /* 0x0 */
        /*0080*/                   LDG.E R3, desc[UR4][R4.64] ;              /* 0x0 */
        /*0090*/              @!UP0 BRA `(.L_x_1) ;                          /* 0x0 */
        /*00a0*/               @P0 BRA 0x80 ;                                /* 0x0 */
        /*00b0*/                   EXIT ;                                    /* 0x0 */
        /*00c0*/                   BRA 0xc0;                                 /* 0x0 */
"""


def test_instructions():
    code = parse(CODE)
    assert [i.address for i in code] == list(range(0, 0xD0, 16))
    assert code[1].name == "LDGSTS"
    assert code[1].opcode == "LDGSTS.E.BYPASS.128"
    assert (code[3].predicate, code[3].operands) == ("@!P2", "0x20")
    assert code[-1].predicate == ""


def test_loops():
    found = loops(parse(CODE))
    spans = [(loop.body[0].address, loop.body[-1].address) for loop in found]
    # the branch at 0x30 goes one instruction back: a wait, which `nested` does not count
    assert spans == [(0x20, 0x30), (0x20, 0x50), (0x10, 0x70), (0x80, 0xA0)]


def test_the_counted_loop_holds_what_is_asked_for():
    code = parse(CODE)
    pipelined = innermost_loop(code, ASYNC_LOADS)
    assert pipelined is not None
    assert pipelined.body[0].address == 0x10
    assert len(pipelined.body) == 7
    assert pipelined.nested == 1
    plain = innermost_loop(code, ("LDG",))
    assert plain is not None
    assert plain.body[0].address == 0x80
    assert plain.nested == 0
    assert innermost_loop(code, ("UTMALDG",)) is None


def test_histogram():
    counted = histogram(parse(CODE))
    assert (counted["BRA"], counted["HGMMA"], counted["LDGSTS"], counted["LDG"]) == (6, 1, 1, 1)


def test_more_than_one_function_is_refused():
    with pytest.raises(ValueError, match="one function, found 2"):
        parse(CODE + "\t\tFunction : other\n")
