"""Trellis codes: each weight has 2 to 4 bits, and its value follows from them and from those before it.

A sequence of T codes of k bits is a ring. The *state* at a place is the last 12 bits of the ring up to there,
the newest ones on top. With s the state, the value is ``G[(s · multiplier mod 4096) >> 4] / 32``, where G has
256 quantiles of a normal distribution as integers. States that follow each other share 12 - k bits, so a
sequence is a path through a trellis of 4096 states, and the nearest one is found by Viterbi's algorithm.
Values of a path are spread in T dimensions rather than in one: at 2 bits the squared error of normal numbers
is 0.071 of their variance, where 4 values of their own leave 0.1175, and no code less than 0.0625.

Sources: trellis-coded quantization, Marcellin and Fischer 1990 (IEEE Trans. Commun. 38); the ring of codes
whose windows are states ("bitshift trellis") and values computed from states, Tseng et al. 2024 (QTIP,
arXiv:2406.11235); the algorithm, Viterbi 1967. The multipliers are those of least error among all odd
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

__all__ = [
    "TRELLIS_BITS",
    "TRELLIS_MULTIPLIERS",
    "TRELLIS_STATE_BITS",
    "TRELLIS_UNIT",
    "decode_trellis",
    "encode_trellis",
    "trellis_values",
]

#: bits of a state
TRELLIS_STATE_BITS = 12
#: what a state is multiplied by, for each number of bits per weight
TRELLIS_MULTIPLIERS = {2: 989, 3: 1545, 4: 3323}
#: bits per weight
TRELLIS_BITS = tuple(TRELLIS_MULTIPLIERS)
#: the integers of `trellis_values` are multiples of 1 / 32
TRELLIS_UNIT = 32

_STATES = 1 << TRELLIS_STATE_BITS
#: standard deviation of the values, in units
_SPREAD = 43.0
#: sequences that the reference encodes at a time
_CHUNK = 64
#: beyond what any value is near to; squares of it stay finite
_FAR = 1e4


@cache
def trellis_values() -> tuple[int, ...]:
    """G: for each index of 8 bits, as two's complement, the quantile at (index + 1/2) / 256 + 1/2.

    The state 0 has the value 0, so that codes of 0 are zeros.
    """
    from statistics import NormalDist

    normal = NormalDist(0.0, _SPREAD)
    quantiles = [round(normal.inv_cdf((i + 0.5) / 256)) for i in range(256)]
    return tuple(quantiles[128:] + quantiles[:128])


def decode_trellis(codes: Tensor, bits: int) -> Tensor:
    """The values (float32, shape of `codes`) of rings of codes, for a scale of 1.

    Args:
        codes: uint8 (..., T), each below 2**bits; T ≥ 12.
        bits: one of `TRELLIS_BITS`.
    """
    wide = codes.to(torch.int32)
    state = torch.zeros_like(wide)
    for back in range(TRELLIS_STATE_BITS // bits):
        state = state + (wide.roll(back, -1) << (TRELLIS_STATE_BITS - bits * (back + 1)))
    return _value_of(state, bits)


def _value_of(state: Tensor, bits: int) -> Tensor:
    index = (state * TRELLIS_MULTIPLIERS[bits] & (_STATES - 1)) >> (TRELLIS_STATE_BITS - 8)
    table = torch.tensor(trellis_values(), dtype=torch.float32, device=state.device)
    values: Tensor = table.index_select(0, index.reshape(-1)).reshape(state.shape)
    return values / TRELLIS_UNIT


def encode_trellis(x: Tensor, bits: int, count: int | None = None) -> Tensor:
    """Codes whose values are near to `x` in the sum of squares: two passes of Viterbi's algorithm.

    The first pass begins and ends in the middle of the ring, in any states. Its path gives the state at which
    the ring is then cut; the second pass finds the nearest path that begins and ends there. That is within 1
    % of the nearest ring of all. All sums are in float32, in one order, so every implementation finds the
    same codes; of equal paths it is the one whose last state, and then whose older codes, are the least.

    Args:
        x: float32 (S, T), T even and 12 at least; NaN counts as 0.
        bits: one of `TRELLIS_BITS`.
        count: places from there on have any value; by default all places matter.

    Returns:
        uint8 (S, T).
    """
    length = x.shape[-1]
    count = length if count is None else count
    x = x.detach().to(torch.float32).nan_to_num(0.0).clamp(-_FAR, _FAR)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    if not x.numel() or x.is_meta:
        return codes
    values = _by_digits(bits, x.device)
    half, places = length // 2, torch.arange(length) < count
    overlap = (1 << (TRELLIS_STATE_BITS - bits)) - 1
    for part in _chunks(x.shape[0]):
        turned = _path(x[part].roll(half, -1), places.roll(half), values, bits, None)
        seam = turned[:, half - 1] & overlap
        states = _path(x[part], places, values, bits, seam)
        codes[part] = (states & ((1 << bits) - 1)).to(torch.uint8)
    return codes


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, _CHUNK):
        yield slice(start, start + _CHUNK)


def _by_digits(bits: int, device: torch.device) -> Tensor:
    """The value of each state, whose codes are numbered with the newest one at the bottom."""
    state = torch.arange(_STATES, dtype=torch.int32, device=device)
    turned, rest = torch.zeros_like(state), state
    for _ in range(TRELLIS_STATE_BITS // bits):
        turned = (turned << bits) | (rest & ((1 << bits) - 1))
        rest = rest >> bits
    return _value_of(turned, bits)


def _path(x: Tensor, places: Tensor, values: Tensor, bits: int, seam: Tensor | None) -> Tensor:
    """The states (S, T), newest code at the bottom, of the nearest path; one from seam to seam.

    A state is (older bits, newest code); states whose lower bits agree lead to the same states. `best` has
    the least cost of each of these lower bits. There are as many states as `values`.
    """
    count, length = x.shape
    shared = len(values) >> bits
    best = torch.zeros(count, shared, dtype=torch.float32, device=x.device)
    if seam is not None:
        best.fill_(torch.inf).scatter_(1, seam[:, None].long(), 0.0)
    origin = torch.zeros(length, count, shared, dtype=torch.uint8, device=x.device)
    cost = torch.empty(count, len(values), dtype=torch.float32, device=x.device)
    less = torch.empty(count, shared, dtype=torch.bool, device=x.device)
    for t, matters in enumerate(places.tolist()):
        if matters:
            torch.sub(x[:, t, None], values, out=cost).square_()
        else:
            cost.zero_()
        cost.view(count, shared, 1 << bits).add_(best[:, :, None])
        groups = cost.view(count, 1 << bits, shared)
        best.copy_(groups[:, 0])
        for code in range(1, 1 << bits):
            torch.lt(groups[:, code], best, out=less)
            torch.minimum(groups[:, code], best, out=best)
            origin[t].masked_fill_(less, code)
    if seam is None:
        least = best.amin(1, keepdim=True)
        seam = (best == least).to(torch.uint8).argmax(1)
    states = torch.empty(count, length, dtype=torch.int64, device=x.device)
    now = seam.long()
    for t in reversed(range(length)):
        state = origin[t].gather(1, now[:, None])[:, 0].long() * shared + now
        states[:, t] = state
        now = state >> bits
    return states
