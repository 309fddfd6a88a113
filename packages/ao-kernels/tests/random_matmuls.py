"""Random linear layers checked against float64: `random_matmuls.py --cases 20000 [--calls 4] [--seed 1]`.

A case draws one of the recipes without training, a dtype, sizes from 1 up, 0 to 1,000 rows of activations
in one to four dimensions, strided and transposed too, with and without a bias; zeros in rows, groups and
columns; subnormal numbers, numbers near the greatest of the dtype, a row with a NaN or an infinity.

Outputs are compared with the matmul in float64 of the weight's own values and, where a recipe quantizes
activations, of the values that it gives them: all together, and every row and every column by itself, so
that a small one counts as much as a large one. Zeros make exactly 0, or the bias. A NaN or an infinity has
the output that the dense matmul has, of quantized activations none that is finite, and the rows beside it
are compared as all others. Case i depends on the seed and i alone: `--first i --cases 1` makes it again.
With `--calls`, a layer is called several times, each time with other activations.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ao_core
from ao_core import QTensor, Spec
from ao_core.ext import fake_quantize, registry
from ao_core.ext.kernels import BANDS, select_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32 = torch.finfo(torch.float32)
#: greatest error, relative to the size of the output: of all (Frobenius), and of any row
BOUND = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
#: the last place of fixed-point numbers below the greatest of them
LIMB = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-15, torch.float16: 2.0**-23}
#: how much greater that of a column may be, which is a single number of a single row
COLUMN = 4
#: what is added to bounds where activations are quantized: a kernel may round a few of them the other way
DYNAMIC = 2e-2
#: how sizes of weights are drawn: usual ones, those of rows apart, outliers, and the ends of the dtype
WEIGHTS = ("usual", "usual", "usual", "rows", "outliers", "subnormal", "large", "half")
#: and a row of activations
ROWS = ("zero_point", "subnormal", "large", "greatest", "wide", "nan", "inf", "-inf")
SHAPES = ("whole", "whole", "strided", "apart", "transposed", "shifted", "repeated")


class Case(NamedTuple):
    """One call of a layer; `rows`: numbers of odd rows of activations → what is odd about them."""

    number: int
    call: int
    recipe: str
    dtype: torch.dtype
    m: int
    n: int
    k: int
    dims: int
    bias: bool
    weight: str
    zeros: tuple[str, ...]
    shape: str
    rows: dict[int, str]
    seed: int

    def __str__(self) -> str:
        """A line for whoever looks for the reason."""
        odd = ", ".join(f"{i} {what}" for i, what in self.rows.items())
        return (
            f"case {self.number} call {self.call}: {self.recipe}, {self.dtype}, "
            f"{self.m} rows in {self.dims}-D, {self.n}×{self.k}{', bias' * self.bias}, "
            f"weight {self.weight}, zeros in {self.zeros}, activations {self.shape}, rows [{odd}]"
        )


@cache
def recipes() -> list[str]:
    """Names of the recipes without training."""
    names = (recipe.name for recipe in registry.recipes.values())
    return sorted(
        n for n in names if "training" not in n and n.partition("/")[0] not in ("float8", "compute")
    )


def draw_rows(rng: random.Random) -> dict[str, Any]:
    """What a case has anew at each call."""
    m = rng.choice([0, 1, 1, 1, 2, 3, 4, 5, 8, 17, 40, 130, rng.randint(0, 1000)])
    odd = rng.sample(range(m), min(m, rng.choice([0, 0, 1, 1, 2, 3])))
    return {
        "m": m,
        "dims": rng.choice([2, 2, 2, 3, 4] if m != 1 else [1, 2, 3, 4]),
        "shape": rng.choice(SHAPES),
        "rows": {i: rng.choice(ROWS) for i in sorted(odd)},
    }


def draw(seed: int, number: int) -> Case:
    """The first call of case `number` of a seed."""
    rng = random.Random(f"{seed} {number}")
    return Case(
        number=number,
        call=0,
        recipe=rng.choice(recipes()),
        dtype=rng.choice(DTYPES),
        n=rng.randint(1, 200),
        k=rng.choice([64, 128, 256, 512, 32 * rng.randint(1, 40), rng.randint(1, 300)]),
        bias=rng.random() < 0.3,
        weight=rng.choice(WEIGHTS),
        zeros=tuple(sorted(rng.sample(["rows", "groups", "columns"], rng.randint(0, 3)))),
        seed=rng.getrandbits(60),
        **draw_rows(rng),
    )


def again(case: Case, call: int) -> Case:
    """The same layer, called with other activations."""
    rng = random.Random(f"{case.seed} {call}")
    return case._replace(call=call, **draw_rows(rng)) if call else case


# -- what is left out --------------------------------------------------------------------------------


def exemption(case: Case) -> str | None:
    """What is known to go wrong in a case."""
    # MX rounds to a power of two that float32 does not have, and code -8 of int4 stands for more than 7
    mx, int4 = (case.recipe.startswith(f"{kind}_dynamic") for kind in ("mx", "int4"))
    if "greatest" in case.rows.values() and (mx or (int4 and case.dtype is not torch.float16)):
        return "activations near the greatest of their dtype, in MX or int4"
    return None


# -- numbers -----------------------------------------------------------------------------------------


def resized(values: Tensor, dtype: torch.dtype, how: str) -> Tensor:
    """Standard normal values (float64) brought to one of the ends of `dtype`."""
    info = torch.finfo(dtype)
    most = values.abs().max().clamp(min=1e-300) if values.numel() else torch.ones(())
    least = info.smallest_normal * info.eps
    sizes = {"subnormal": 16 * least, "large": info.max**0.5}
    # weights beyond half of the greatest number are refused
    sizes |= {"half": 0.49 * info.max, "greatest": 0.99 * info.max}
    return values * (sizes[how] / most)


def make_weight(
    case: Case, rng: random.Random, generator: torch.Generator
) -> tuple[Tensor, list[int]]:
    """A weight (N, K), and which of its rows are zeros."""
    n, k = case.n, case.k
    w = torch.randn(n, k, generator=generator, dtype=torch.float64)
    if case.weight == "rows":
        w *= 2 * torch.randn(n, 1, generator=generator).exp2()
    elif case.weight == "outliers":
        w[rng.randrange(n), rng.randrange(k)] = 60
    elif case.weight != "usual":
        w = resized(w, case.dtype, case.weight)
    if case.weight in ("usual", "rows", "outliers"):
        w *= 2.0 ** rng.uniform(-6, 4)
    zeros = rng.sample(range(n), rng.randint(1, min(n, 3))) if "rows" in case.zeros else []
    w[zeros] = 0
    if "groups" in case.zeros:
        begin = 32 * rng.randrange(k // 32) if k >= 32 else 0
        w[rng.randrange(n), begin : begin + rng.choice([32, 64, k])] = 0
    if "columns" in case.zeros:
        w[:, rng.randrange(k)] = 0
    return w.to(case.dtype), zeros


def make_rows(case: Case, rng: random.Random, generator: torch.Generator) -> Tensor:
    """Activations (M, K)."""
    x = torch.randn(case.m, case.k, generator=generator, dtype=torch.float64)
    x += rng.choice([0.0, 0.0, 0.5])
    if case.shape == "repeated" and case.m:
        x[:] = x[0].clone()
        return x.to(case.dtype)
    for i, how in case.rows.items():
        if how == "zero_point":
            x[i] = 0
        elif how == "wide":
            x[i] *= (4 * torch.randn(case.k, generator=generator)).exp2()
        elif how in ("nan", "inf", "-inf"):
            x[i, rng.randrange(case.k)] = float(how)
        else:
            x[i] = resized(x[i], case.dtype, how)
    greatest = torch.finfo(case.dtype).max
    return torch.where(x.isfinite(), x.clamp(-greatest, greatest), x).to(case.dtype)


def arrange(x: Tensor, case: Case, rng: random.Random) -> Tensor:
    """Equal activations of other strides, and in as many dimensions as the case has."""
    m, k = x.shape
    if case.shape == "strided":
        x = x.new_full((m, k + rng.randint(1, 9)), 7)[:, :k].copy_(x)
    elif case.shape == "apart":
        x = x.new_full((2 * m, 2 * k), 7)[::2, ::2].copy_(x)
    elif case.shape == "transposed":
        x = x.t().contiguous().t()
    elif case.shape == "shifted":
        x = x.new_full((m * k + 1,), 7)[1:].view(m, k).copy_(x)
    elif case.shape == "repeated" and m:
        x = x[:1].expand(m, k)
    first = rng.choice([i for i in range(1, m + 1) if m % i == 0]) if m else rng.randint(0, 3)
    rest = m // first if first else rng.randint(0, 3)
    sizes = {1: (), 2: (m,), 3: (first, rest), 4: (first, 1, rest)}[case.dims]
    return x.view(*sizes, k) if m and x.is_contiguous() else x.reshape(*sizes, k)


# -- the comparison ----------------------------------------------------------------------------------


class Made(NamedTuple):
    """A quantized layer; `zeros`: which rows of its weight are zeros, `values`: its weight in float64."""

    layer: nn.Linear
    zeros: list[int]
    values: Tensor


@torch.inference_mode()
def make_layer(case: Case) -> Made:
    """The layer of all calls of a case."""
    rng = random.Random(case.seed)
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    weight, zeros = make_weight(case, rng, generator)
    layer = nn.Linear(case.k, case.n, bias=case.bias, device="meta").to_empty(device="cpu")
    layer.to(case.dtype).weight.data = weight
    if case.bias:
        layer.bias.data = torch.randn(case.n, generator=generator).to(case.dtype)
    ao_core.quantize_(layer, case.recipe)
    w = layer.weight
    values = w.canonical().dequantize(torch.float32) if isinstance(w, QTensor) else w
    return Made(layer, zeros, values.double())


@torch.inference_mode()
def problem_of(case: Case, made: Made) -> str:
    """What is wrong with a call of a layer, or nothing."""
    rng = random.Random(f"{case.seed} rows {case.call}")
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    layer, w = made.layer, made.layer.weight
    x = make_rows(case, rng, generator)
    given = arrange(x, case, rng)
    out = layer(given)
    if out.shape != (*given.shape[:-1], case.n) or out.dtype != case.dtype:
        return f"output {tuple(out.shape)} {out.dtype}"
    spec = w.spec if isinstance(w, QTensor) else None
    dense = is_dense(given, w)
    least = least_weight(case.dtype) if dense else least_activation(case.dtype)
    spills = dense and case.dtype is torch.bfloat16
    out = out.reshape(case.m, case.n)
    return compare(case, x, out, made.values, layer.bias, spec, made.zeros, least, spills=spills)


def is_dense(x: Tensor, w: Tensor) -> bool:
    """Whether torch's dense matmul serves a layer."""
    kernel = select_linear(x, w) if isinstance(w, QTensor) else None
    return kernel is None or kernel.priority < BANDS["compiled"]


def least_activation(dtype: torch.dtype) -> float:
    """The least activation that the compiled matmuls tell from 0; those of torch may flush subnormal ones."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def least_weight(dtype: torch.dtype) -> float:
    """The least weight that a matmul tells from 0: processors flush subnormal operands in bfloat16."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (1 if dtype is torch.bfloat16 else info.eps)


def compare(
    case: Case, x: Tensor, out: Tensor, values: Tensor, bias: Tensor | None, spec: Spec | None,
    zeros: list[int], least: float, *, spills: bool,
) -> str:  # fmt: skip
    """What is wrong with the output of activations (M, K) and a weight of these values, or nothing.

    Args:
        case, x, values, bias, spec: what the matmul was of.
        out: the output (M, N).
        zeros: rows of the weight that are 0.
        least: the least activation that the matmul tells from 0.
        spills: rows before one that is not finite are not compared: torch 2.13 multiplies the beginning of
            the next row of bfloat16 by zeros where AMX registers exceed K.
    """
    act = spec.act if spec else None
    odd = ~x.isfinite().all(1)
    if odd.any():
        wrong = spread(x[odd].double(), out[odd], values, bias, act)
        if wrong:
            return wrong
    compared = ~odd
    if spills:
        compared[:-1] &= ~odd[1:]
    x, out, compared = x[~odd], out[~odd], compared[~odd][:, None]
    read = (x if act is None else fake_quantize(x.float(), act)).double()
    added = torch.zeros(case.n, dtype=torch.float64) if bias is None else bias.double()
    # codes of integers are added up before their scale brings them back, and so is what zero points add
    zeroed = act is not None and act.zero_point != "none"
    coded = act is not None and act.dtype in ("int8", "uint8")
    summed = values.abs().sum(1) < (FLOAT32.max / 1024 if coded else torch.inf)
    if ((out != added) & compared & ~x.any(1, keepdim=True))[:, summed].any():
        return "activations of zeros do not make 0"
    if not values[zeros].any() and ((out[:, zeros] != added[zeros]) & compared).any():
        return "weights of zeros do not make 0"
    expected = F.linear(read, values) + added
    bound = BOUND[case.dtype] + (0 if act is None else DYNAMIC)
    info = torch.finfo(case.dtype)
    # of sums of numbers of these sizes and of either sign; where a result may lie; and what it is rounded to
    size = F.linear(read.square(), values.square()).sqrt() + added.abs() + expected.abs()
    low, high = expected - 5 * bound * size, expected + 5 * bound * size
    # weights and activations may be off by the least number, and so the output; sums by that of float32
    off = least * (1 + values.abs().sum(1))
    off = off + least_weight(case.dtype) * read.abs().sum(1, keepdim=True)
    off = off + case.k * FLOAT32.smallest_normal * FLOAT32.eps
    # one row, and rows in bfloat16, become fixed-point numbers, of the greatest in a part of a row
    if act is None and (case.m == 1 or case.dtype is torch.bfloat16):
        off = off + LIMB[case.dtype] * read.abs().amax(1, keepdim=True) * values.abs().sum(1)
    if zeroed:  # their steps are no less than the least normal number
        off = off + BOUND[torch.float32] * 128 * FLOAT32.smallest_normal * values.abs().sum(1)
    # sums that exceed float32 on their way come from dense matmuls, too
    held = F.linear(read.abs(), values.abs()) + added.abs() < FLOAT32.max / 4
    # codes are added up, and zero points times activations, which cancel: K numbers of a row's whole range
    if spec and spec.zero_point != "none":
        reach = 2 * values.abs().amax(1)
        off = off + case.k**0.5 * FLOAT32.eps / 2 * read.norm(dim=1, keepdim=True) * reach
        held &= read.abs().sum(1, keepdim=True) * reach < FLOAT32.max / 4
    held &= summed & compared
    finite = (out != torch.inf) & (low > info.max) | (out != -torch.inf) & (high < -info.max)
    if (finite & held).any():
        return "what exceeds the dtype is not an infinity"
    inside = held & (low > -info.max) & (high < info.max)
    if not out[inside].isfinite().all():
        return f"{int((~out[inside].isfinite()).sum())} outputs of {out.numel()} are not finite"
    error = ((out.double() - expected).abs() - off).clamp(min=0).where(inside, 0)
    size = size.where(inside, 0)
    part, count = error / size.clamp(min=1e-300), inside.double()
    found = {
        "all": error.norm() / size.norm().clamp(min=1e-300),
        "a row": (part.square().sum(1) / count.sum(1).clamp(min=1)).sqrt(),
        "a column": (part.square().sum(0) / count.sum(0).clamp(min=1)).sqrt() / COLUMN,
    }
    for where, errors in found.items():
        if errors.numel() and not float(errors.max()) <= bound:
            return f"relative error of {where} {float(errors.max()):.2g}, bound {bound:.2g}"
    return ""


def spread(x: Tensor, out: Tensor, values: Tensor, bias: Tensor | None, act: Spec | None) -> str:
    """What is wrong with rows that have a NaN or an infinity."""
    if act is not None:
        count = int(out.isfinite().sum())
        return f"{count} finite outputs of a row with a NaN or an infinity" if count else ""
    expected = F.linear(x, values, None if bias is None else bias.double())
    same = (out.isnan() == expected.isnan()) & (expected.isnan() | (out.double() == expected))
    vague = (values != 0) & (values.abs() < least_weight(out.dtype))
    same |= F.linear(x.isinf().double(), vague.double()) > 0
    # what makes infinities on the way does so in dense matmuls, too
    same |= F.linear(x.nan_to_num(0, 0, 0).abs(), values.abs()) > FLOAT32.max / 4
    return (
        "" if same.all() else f"{int((~same).sum())} outputs of a NaN or infinity are not as dense"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for option, default in (("cases", 20000), ("calls", 1), ("seed", 1), ("first", 0)):
        parser.add_argument(f"--{option}", type=int, default=default, help=f"default: {default}")
    args = parser.parse_args()
    done: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    wrong = 0
    torch.set_num_threads(1)
    for number in range(args.first, args.first + args.cases):
        first = draw(args.seed, number)
        made = make_layer(first)
        for call in range(args.calls):
            case = again(first, call)
            known = exemption(case)
            if known:
                left_out[known] += 1
                continue
            done[case.recipe] += 1
            problem = problem_of(case, made)
            if problem:
                wrong += 1
                sys.stdout.write(f"{case}: {problem}\n")
                sys.stdout.flush()
    sys.stdout.write(
        f"seed {args.seed}: {done.total()} calls of layers of {len(done)} recipes, {wrong} wrong"
        f"{''.join(f'; {count} left out: {name}' for name, count in left_out.items())}\n"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
