"""Ops called by themselves: `opcheck`, random bad arguments, and what the errors say."""

from __future__ import annotations

import random
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ao_core.testing.warm import run_python
from ao_kernels.cpu.library import load

SCRIPT = Path(__file__).with_name("fuzz_ops.py")


def script() -> ModuleType:
    spec = spec_from_file_location("fuzz_ops", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


load()
FUZZ = script()


def test_random_calls() -> None:
    """In a process of its own, because a mistake here may be a crash."""
    done = run_python(SCRIPT, "--calls", 250 * len(FUZZ.OPS), timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    counts = re.findall(r"^(\w+): (\d+) accepted, (\d+) refused$", done.stdout, re.MULTILINE)
    assert {name for name, _, _ in counts} == set(FUZZ.OPS)
    assert all(int(accepted) > 50 and int(refused) > 50 for _, accepted, refused in counts)


def sample(name: str) -> tuple[Any, ...]:
    """Valid arguments, in order, without scales of 8 bits: opcheck cannot compare those."""
    op = getattr(torch.ops.ao_kernels, name).default
    for seed in range(1000):
        arguments = FUZZ.OPS[name](random.Random(seed))
        ends = ("scale", "scale_outer", "offset", "offset_outer")
        scales = [value for key, value in arguments.items() if key.endswith(ends)]
        if all(scale is None or scale.dtype not in FUZZ.SCALES[3:] for scale in scales):
            break
    return tuple(arguments[argument.name] for argument in op._schema.arguments)


@pytest.mark.parametrize("name", FUZZ.OPS)
def test_opcheck(name: str) -> None:
    """Schema, fake and autograd registration."""
    op = getattr(torch.ops.ao_kernels, name).default
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    results = torch.library.opcheck(op, sample(name), test_utils=utils)
    assert set(results.values()) == {"SUCCESS"}, results


BAD: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("pack_tiles", {"packed": torch.zeros(3, 5)}, "packed: has dtype Float; must be one of Byte"),
    ("pack_tiles", {"bits": 9}, "bits=9: must be in 1..8"),
    ("pack_tiles", {"flip": -1}, "flip=-1: must be in 0.."),
    ("unpack_tiles", {"n": -5}, "n=-5: must be in 1.."),
    ("unpack_tiles", {"group": 0}, "group=0: must be in 1.."),
    ("dequantize_tiles", {"scale": torch.zeros(7)}, "scale: has shape (7), so 7 elements; must have "),
    ("dequantize_tiles", {"table": torch.zeros(3)}, "table: has 3 values; must have 2, 4, 8, ... or 256"),
    ("dequantize_tiles", {"dtype": torch.int32}, "dtype: is Int; must be Float, BFloat16 or Half"),
    ("dequantize_tiles", {"zero_point": torch.zeros(3).double()}, "zero_point: has dtype Double; "),
    ("dequantize_tiles", {"span": 0}, "span=0: must be in 1.."),
    ("dequantize_tiles", {"scale_outer": torch.zeros(3)}, "scale_outer: has shape (3), so 3 elements; "),
    ("dequantize_tiles", {"scale_outer": torch.zeros(3).char()}, "scale_outer: has dtype Char; must be "),
    ("linear", {"scale": torch.zeros(3).short()}, "scale: has dtype Short; must be Float, BFloat16, "),
    ("linear", {"table": torch.zeros(3).double()}, "table: has dtype Double; must be one of Float, Int"),
    ("linear", {"offset": None, "offset_outer": torch.zeros(3)}, "offset_outer: multiplies `offset`, "),
    ("linear", {"zero_point": torch.zeros(5), "offset": torch.zeros(5)}, "zero_point: has shape (5), so 5 "),
    ("hadamard", {"x": torch.zeros(8).double()}, "x: is Double; must be Float, BFloat16 or Half"),
    ("hadamard", {"x": torch.zeros(())}, "x: has no dimension to transform along"),
    ("hadamard", {"x": torch.zeros(2, 8), "factors": [16]}, "x: has shape (2, 8); its last dimension must "),
    ("hadamard", {"factors": []}, "factors: has 0 orders; must have 1 to 13"),
    ("hadamard", {"factors": [12, 3]}, "factors: the last is 3; must be a power of two up to 2**40"),
    ("hadamard", {"factors": [92, 2]}, "factors: 92 is no order of Paley's matrices from 12 to 1024"),
    ("hadamard", {"factors": [4, 2]}, "factors: 4 is no order of Paley's matrices from 12 to 1024"),
    ("hadamard", {"factors": [1020] * 4 + [2]}, "factors: their product is more than 2**40"),
    ("embedding", {"ids": torch.zeros(3)}, "ids: has dtype Float; must be one of Long, Int"),
    ("quantize", {"x": None}, "x: must be a tensor, found None"),
    ("quantize", {"k": 0}, "k=0: must be in 1.."),
    ("quantize", {"quant_max": float("nan")}, "quant_max=nan: must be positive, from 2**-100 to 2**100"),
    ("quantize", {"mx_mode": 4}, "mx_mode=4: must be in 0..3"),
    ("encode", {"order": torch.zeros(1, dtype=torch.uint8)}, "order: has shape (1), so 1 elements"),
    ("dequantize", {"codes": torch.zeros(0, dtype=torch.uint8)}, "codes: is empty"),
    ("scale_sums", {"power": 3.0}, "power=3: must be above 0 and at most 2"),
    ("search_scales", {"fits": 65}, "fits=65: must be from 0 to 64"),
    ("search_scales", {"stages": torch.zeros(3)}, "stages: has dtype Float; must be one of Int"),
    ("search_scales", {"least": 0.0}, "least=0: must be above 0"),
    ("scale_sums", {"scale": torch.zeros(3)}, "scale: has shape (3); must have 2 dimensions"),
    ("scale_sums", {"importance": torch.zeros(1, 1).double()}, "importance: has dtype Double; must"),
    ("learned_gradients", {"reach": -1.0}, "reach=-1: must be finite, and not negative"),
    ("learned_gradients", {"grad": torch.zeros(3)}, "grad: has shape (3); must be ("),
    ("two_four_mask", {"x": torch.zeros(3)}, "x: has shape (3); must have 2 dimensions"),
    ("error_sums", {"step": 0}, "step=0: must be in 1.."),
    ("error_sums", {"x": torch.zeros(1)}, "x: has shape (1), so 1 elements; must have "),
    ("qkv", {"heads": [1, 2]}, "heads: has 2 numbers; must have 3"),
    ("qkv", {"x": torch.zeros(2, 4)}, "x: has shape (2, 4); must have 3 dimensions"),
    ("qkv", {"gain": 3}, "gain=3: must be in 0..2"),
    ("qkv", {"numbers": [1]}, "numbers: are 1; must be 6"),
    ("mlp", {"down_scale": torch.zeros(1).double()}, "down_scale: has dtype Double; must be Float"),
    ("mlp", {"gate": 2}, "gate=2: must be in 0..1"),
    ("mlp", {"down_table": None}, "down_qdata: must be given, as must scale and table"),
    ("rule_step", {"kinds": [3]}, "kinds: one=3: must be in 0..2"),
    ("rule_step", {"program": [0]}, "program: has 1 numbers; must have 5 per instruction"),
    ("rule_step", {"program": [17, 0, 0, 0, 0], "numbers": [0.0]}, "program: an operation=17: must"),
    ("rule_step", {"program": [16, 0, 0, 0, 0] * 2, "numbers": [0.0] * 2}, "program: has a norm of what"),
    ("rule_step", {"program": [2, 0, 0, 15, 0], "numbers": [0.0]}, "program: reads register 15, which"),
    ("rule_step", {"outputs": []}, "outputs: has 0 registers; must have "),
    ("rule_step", {"grads": []}, "grads: has 0 tensors; must have "),
    ("quantize_rows", {"act": 5}, "act=5: must be in 1..4"),
    ("quantize_rows", {"x": torch.zeros(3)}, "x: has shape (3); must have 2 dimensions"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "bad", "text"), BAD, ids=lambda value: str(value)[:40])
def test_errors_name_argument_value_and_what_would_work(
    name: str, bad: dict[str, Any], text: str
) -> None:
    arguments = {**FUZZ.OPS[name](random.Random(1)), **bad}
    with pytest.raises(RuntimeError) as raised:
        getattr(torch.ops.ao_kernels, name).default(**arguments)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("name", ["linear", "dequantize_tiles", "embedding"])
def test_values_of_codes_may_be_given_as_their_bits(name: str) -> None:
    op, arguments = getattr(torch.ops.ao_kernels, name).default, FUZZ.OPS[name](random.Random(3))
    expected = op(**arguments)
    table = arguments["table"].view(torch.int32)
    torch.testing.assert_close(
        op(**{**arguments, "table": table}), expected, rtol=0, atol=0, equal_nan=True
    )


def test_misaligned_memory() -> None:
    data = torch.frombuffer(bytearray(33), dtype=torch.float32, offset=1, count=8).reshape(1, 8)
    with pytest.raises(RuntimeError, match="x: its memory is not aligned to 4 bytes"):
        torch.ops.ao_kernels.quantize_rows(data, 1)
