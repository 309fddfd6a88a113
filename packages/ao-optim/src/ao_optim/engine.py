"""One step of a rule over many tensors in torch operations, in chunks, so that what it needs stays small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext.kernels import decode_parts, encode_parts, local_shard, overwrite, shard_like
from ao_core.ext.numerics import pack_unit, stochastic_round_to
from ao_optim.formats import dense
from ao_optim.rules import Options, Rule

__all__ = ["CHUNK", "Work", "mixed", "run"]

#: elements that are updated at a time, unless a tensor must be taken whole
CHUNK = 1 << 18


class Work(NamedTuple):
    """Tensors of one dtype, device and state format, with equal numbers of steps behind them."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    #: slot -> one moment for each parameter, dense or quantized
    states: dict[str, list[Tensor]]
    #: what rounding took from each parameter, or nothing
    lost: Sequence[Tensor] = ()


class _Piece(NamedTuple):
    """Elements start to stop of a flattened tensor, and zeros to a whole number of blocks."""

    tensor: int
    start: int
    stop: int
    padding: int

    @property
    def size(self) -> int:
        """Elements and zeros."""
        return self.stop - self.start + self.padding


def run(
    rule: Rule, work: Work, options: Options, step: Any, *, maximize: bool, seed: int | None
) -> None:
    """Change parameters and moments in place.

    Args:
        rule: the update rule.
        work: what it is applied to.
        options: of the rule.
        step: counts from 1; a number, or a tensor on the device.
        maximize: go up the gradient.
        seed: round bfloat16 parameters stochastically by it, or None: to nearest.
    """
    if rule.elementwise and all(_in_rows(state) for each in work.states.values() for state in each):
        for number, pieces in enumerate(_chunks(work)):
            _run_chunk(rule, work, pieces, options, step, maximize, _generator(work, seed, number))
        return
    for index, param in enumerate(work.params):
        generator = _generator(work, seed, index)
        _run_whole(rule, work, index, param, options, step, maximize, generator)


def mixed(*numbers: int) -> int:
    """A seed of 63 bits from several numbers: near ones give unrelated seeds."""
    found = 0
    for number in numbers:
        # the finalizer of splitmix64 (Steele et al. 2014)
        found = (found + number + 0x9E3779B97F4A7C15) % (1 << 64)
        found = (found ^ (found >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        found = (found ^ (found >> 27)) * 0x94D049BB133111EB % (1 << 64)
        found ^= found >> 31
    return found >> 1


def _generator(work: Work, seed: int | None, number: int) -> torch.Generator | None:
    if seed is None or work.params[0].dtype != torch.bfloat16:
        return None
    return torch.Generator(work.params[0].device).manual_seed(mixed(seed, number))


# -- whole tensors ---------------------------------------------------------------------------------


def _run_whole(
    rule: Rule,
    work: Work,
    index: int,
    param: Tensor,
    options: Options,
    step: Any,
    maximize: bool,
    generator: torch.Generator | None,
) -> None:
    value = param.float() if param.dtype != torch.float32 else param.clone()
    if work.lost:
        value += shard_like(param, work.lost[index])
    grad = work.grads[index].float()
    state = {}
    for name, each in work.states.items():
        state[name] = shard_like(param, dense(each[index]))
    rule.update(value, -grad if maximize else grad, state, options, step)
    for name, each in work.states.items():
        found, moment = local_shard(state[name]), each[index]
        if isinstance(moment, QTensor):
            overwrite(moment, found)
        else:
            moment.copy_(_rounded(found, moment, generator))
    found = local_shard(value)
    _round_into([local_shard(param)], list(work.lost[index : index + 1]), [found], found, generator)


# -- chunks ----------------------------------------------------------------------------------------


def _in_rows(state: Tensor) -> bool:
    """Whether a moment can be cut as a flat run of elements, as blocks over all of them can."""
    if not isinstance(state, QTensor):
        return True
    return state.layout_record.blocked_shape(tuple(state.shape)) == (state.numel(),)


def _chunks(work: Work) -> Iterator[list[_Piece]]:
    """The tensors in pieces of whole blocks, several small ones or a part of a large one at a time."""
    unit = 1
    for each in work.states.values():
        if isinstance(each[0], QTensor):
            unit = lcm(unit, each[0].spec.block[-1], pack_unit(each[0].format.bits)[0])
    room, pieces = CHUNK // unit * unit, []
    for index, param in enumerate(work.params):
        start, size = 0, param.numel()
        while start < size:
            stop = min(size, start + room)
            pieces.append(_Piece(index, start, stop, -stop % unit if stop == size else 0))
            room -= pieces[-1].size
            start = stop
            if room <= 0:
                yield pieces
                room, pieces = CHUNK // unit * unit, []
    if pieces:
        yield pieces


def _run_chunk(
    rule: Rule,
    work: Work,
    pieces: list[_Piece],
    options: Options,
    step: Any,
    maximize: bool,
    generator: torch.Generator | None,
) -> None:
    own = _slices(work.params, pieces)
    value = _joined(own, pieces).to(torch.float32)
    lost = _slices(work.lost, pieces) if work.lost else []
    if lost:
        value += _joined(lost, pieces)
    grad = _joined(_slices(work.grads, pieces), pieces).to(torch.float32)
    state = {name: _read(each, pieces) for name, each in work.states.items()}
    rule.update(value, -grad if maximize else grad, state, options, step)
    for name, each in work.states.items():
        _write(each, pieces, state[name], generator)
    _round_into(own, lost, _split(value, pieces), value, generator)
    _return_strided(work.params, own, pieces)
    if lost:
        _return_strided(work.lost, lost, pieces)


def _slices(tensors: Sequence[Tensor], pieces: list[_Piece]) -> list[Tensor]:
    """The pieces: views of contiguous tensors, copies of others."""
    return [tensors[i].reshape(-1)[start:stop] for i, start, stop, _ in pieces]


def _return_strided(tensors: Sequence[Tensor], own: list[Tensor], pieces: list[_Piece]) -> None:
    """Write pieces that are copies to where they belong."""
    for (index, start, stop, _), piece in zip(pieces, own, strict=True):
        tensor = tensors[index]
        if tensor.is_contiguous():
            continue
        whole = tensor.reshape(-1)
        whole[start:stop] = piece
        tensor.copy_(whole.view(tensor.shape))


def _joined(own: list[Tensor], pieces: list[_Piece]) -> Tensor:
    """One new flat tensor of all pieces with their padding."""
    parts = []
    for piece, (*_, padding) in zip(own, pieces, strict=True):
        parts.append(piece)
        if padding:
            parts.append(piece.new_zeros(padding))
    return torch.cat(parts)


def _split(joined: Tensor, pieces: list[_Piece]) -> list[Tensor]:
    """The inverse of `_joined`, as views."""
    found, offset = [], 0
    for piece in pieces:
        found.append(joined[offset : offset + piece.stop - piece.start])
        offset += piece.size
    return found


def _stored(states: list[Tensor], pieces: list[_Piece], name: str) -> tuple[list[Tensor], Any]:
    """Views of one part where the pieces of quantized moments have their entries, and how it is cut."""
    first = states[pieces[0].tensor]
    assert isinstance(first, QTensor)
    axis = first.layout_record.geometry(first.spec, (CHUNK,), first.format)[name][0]
    assert axis is not None
    found = []
    for index, start, stop, _ in pieces:
        entries = slice(start // axis.values * axis.entries, -(-stop // axis.values) * axis.entries)
        found.append(getattr(states[index], name)[entries])
    return found, axis


def _read(states: list[Tensor], pieces: list[_Piece]) -> Tensor:
    """A moment of all pieces as one flat float32 tensor, 0 in the padding."""
    first = states[pieces[0].tensor]
    if not isinstance(first, QTensor):
        return _joined(_slices(states, pieces), pieces).to(torch.float32)
    total = sum(piece.size for piece in pieces)
    parts = {}
    for name in first.part_names:
        own, axis = _stored(states, pieces, name)
        filled = []
        for entries, piece in zip(own, pieces, strict=True):
            filled.append(entries)
            missing = piece.size // axis.values * axis.entries - len(entries)
            if missing:
                filled.append(entries.new_zeros(missing))
        parts[name] = torch.cat(filled)
    values = decode_parts(parts, first.spec, (total,), torch.float32)
    offset = 0
    for piece in pieces:
        offset += piece.size
        if piece.padding:
            values[offset - piece.padding : offset].zero_()
    return values


def _write(
    states: list[Tensor], pieces: list[_Piece], value: Tensor, generator: torch.Generator | None
) -> None:
    first = states[pieces[0].tensor]
    if not isinstance(first, QTensor):
        kept = _rounded(value, first, generator)
        torch._foreach_copy_(_slices(states, pieces), _split(kept, pieces))
        return
    parts = encode_parts(value, first.spec)
    for name in first.part_names:
        own, axis = _stored(states, pieces, name)
        found, offset = [], 0
        for entries, piece in zip(own, pieces, strict=True):
            found.append(parts[name][offset : offset + len(entries)])
            offset += piece.size // axis.values * axis.entries
        torch._foreach_copy_(own, found)


def _rounded(value: Tensor, into: Tensor, generator: torch.Generator | None) -> Tensor:
    """A moment as the dtype of its memory has it where parameters are rounded at random; else as it is.

    An average over a thousand steps changes by less than bfloat16 can tell: nearest, it would stand still.
    """
    if generator is None or into.dtype != torch.bfloat16:
        return value
    return stochastic_round_to(value, torch.bfloat16, generator)


def _round_into(
    params: list[Tensor],
    lost: list[Tensor],
    values: list[Tensor],
    value: Tensor,
    generator: torch.Generator | None,
) -> None:
    """Write float32 values into parameters, and what their dtype cannot hold into `lost`.

    `values` are views of `value`, or the same.
    """
    if generator is not None:
        value.copy_(stochastic_round_to(value, torch.bfloat16, generator))
    torch._foreach_copy_(params, values)
    if lost:
        torch._foreach_sub_(values, [param.float() for param in params])
        torch._foreach_copy_(lost, values)
