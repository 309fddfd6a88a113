"""Attention over quantized keys and values in Triton's interpreter, by the trials of the op, against float64.

The interpreter has no inline assembly, whose twins in plain operations run here, and its bfloat16 is
wrong, so queries are in float16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core import WHOLE, Spec, quantize_tensor
from ao_core.ext import hadamard_step, registry
from ao_core.testing.base import gaussian
from ao_core.testing.kernel_attend import ATTEND, Attending
from ao_core.testing.trials import KernelCase
from ao_kernels.triton.attend import op
from ao_kernels.triton.attend.records import attend

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

_STEP = (hadamard_step(8),)
TOKEN = Spec("int8", (1, WHOLE), "float16")
GROUP = Spec("uint4", (1, 64), "float16", "float", "packed", input=_STEP)
CHANNEL = Spec("uint4", (128, 1), "float16", "float", "packed", input=_STEP)
#: the recipes of KV caches, and formats without zero points, or with integer ones
PAIRS = (
    (TOKEN, GROUP),
    (CHANNEL, Spec("uint4", (1, WHOLE), "float16", "float", "packed", input=_STEP)),
    (Spec("f8e4m3", (1, WHOLE), "float16"), Spec("f8e4m3", (1, WHOLE), "float16")),
    (Spec("int4", (1, WHOLE), "bfloat16", layout="packed"), Spec("uint8", (1, 32), "float32", "int")),
    (Spec("uint4", (256, 1), "float32", layout="packed"), TOKEN),
)  # fmt: skip
SHAPES = ((1, 1, 140, 72), (2, 1, 130, 40))
#: one query, and as many as a tile does not have; all that may be given, and none of it
BATCHES = (
    Attending(1, 4, 129, 70, centered=True),
    Attending(13, 3, 130, 20, True, padding=5, behind=3, sinks=True, softcap=1.5),
    Attending(3, 2, 110, 20, causal=False, padding=3, behind=25),
    Attending(1, 2, 130, 90, window=30, padding=100),
)


def trial(pair, shape, batch, seed=0):
    case = KernelCase(pair, shape, torch.float16, "cpu")
    ((args, expected),) = ATTEND.samples(case, batch, seed)
    return args, expected


def near(found, expected, bound=2e-3):
    assert (found.shape, found.dtype) == (expected.shape, torch.float16)
    assert (found.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_each_format(pair):
    """Every call of a format in one split or in two, and in each shape."""
    for number, batch in enumerate(BATCHES):
        args, expected = trial(pair, SHAPES[number % 2], batch)
        near(op.attend(*args, splits=(1, 2)[number // 2]), expected)


@pytest.mark.parametrize(
    "batch",
    [
        Attending(0, 2, 100),
        Attending(1, 2, 0, 1),
        Attending(3, 2, 0, 3, sinks=True),
        Attending(2, 1, 0, 0, causal=False),
        Attending(6, 1, 130, behind=2),
        Attending(66, 1, 60, 9, padding=50),
    ],
    ids=str,
)
def test_ends_of_what_may_be_asked(batch):
    """No query, no tokens, none in codes, no tail, more rows than a tile, rows that see nothing."""
    args, expected = trial((TOKEN, TOKEN), (2, 1, 130, 40), batch)
    for splits in (1, 2):
        near(op.attend(*args, splits=splits), expected)


def test_inputs_of_any_stride():
    args, expected = trial((TOKEN, TOKEN), SHAPES[1], BATCHES[0])
    for variant in ATTEND.strided(args):
        near(op.attend(*variant), expected)


def test_counts_of_more_than_there_is_read_nothing_else():
    """The device reads them, and nobody waits: what there is no memory for is left out."""
    args, _ = trial((TOKEN, TOKEN), (1, 1, 130, 40), Attending(1, 1, 130, 10))
    q, key, value, _, tail_key, tail_value, *rest = args
    tail_key, tail_value = (gaussian(x.shape).to(x.dtype) for x in (tail_key, tail_value))
    for given in ([10**9, 130], [1 << 40, 1 << 40], [-5, -7], [130, -1]):
        found = op.attend(q, key, value, torch.tensor(given), tail_key, tail_value, *rest)
        assert found.isfinite().all()


def test_values_of_all_sizes():
    """Scales far from 1 do not leave float16, also those of tokens beside each other."""
    sizes = torch.exp2(torch.linspace(-14, 2, 130))[:, None]
    args, _ = trial((TOKEN, TOKEN), (1, 1, 130, 40), Attending(1, 4, 130))
    dense = gaussian((1, 1, 130, 48)).to(torch.float16) * 1e-3
    for values in (dense, dense * sizes.to(torch.float16) * 1e3):
        value = quantize_tensor(values, TOKEN)
        given = (*args[:2], value, *args[3:])
        near(op.attend(*given), registry.ops.get("attend").reference(*given).double())


def test_the_same_bits_twice():
    args, _ = trial(PAIRS[0], SHAPES[0], BATCHES[0])
    assert torch.equal(*(op.attend(*args, splits=2) for _ in range(2)))


def test_what_is_no_number_stays_in_its_row():
    args, _ = trial((TOKEN, TOKEN), SHAPES[1], replace(BATCHES[0], queries=3))
    expected = op.attend(*args)
    args[0][1, 2, 1, 5] = torch.nan
    found = op.attend(*args)
    bad = found.isnan().all(-1)
    assert bad.nonzero().tolist() == [[1, 2, 1]]
    assert torch.equal(found[~bad], expected[~bad])


def test_the_kernels_of_the_table_are_these():
    for layout in ("plain", "packed"):
        assert registry.kernels.get(f"triton_attend_{layout}").fn is attend
