"""The state of bitsandbytes' optimizers, read as the same codes and scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext import CheckpointError
from ao_core.ext.numerics import dynamic_values
from ao_optim.formats import FORMATS
from ao_optim.rules import Slot

__all__ = ["unpacked"]

#: where its state dicts hide their tensors from FSDP
_WRAPPED = "__bnb_optimizer_quant_state__"
_DYNAMIC = FORMATS["dynamic8"]


def unpacked(saved: dict[str, Any], slots: Sequence[Slot], part: Tensor) -> dict[str, Any]:
    """The state of one parameter under this package's names; any other state is returned as it is.

    Its 8-bit moments, in blocks of 256, become quantized tensors of the same bits: ``state1`` is the
    first slot (or, of AdEMAMix, both averages stacked), ``state2`` the one after it.

    Raises:
        CheckpointError: its table of values is not the dynamic map, or its blocks have another size.
    """
    inner = saved.get(_WRAPPED, {})
    flat = {**saved, **inner} if isinstance(inner, dict) else saved
    if "state1" not in flat:
        return saved
    found: dict[str, Any] = {"step": flat.get("step", 0)}
    names = iter(slots)
    for number in (1, 2):
        if flat.get(f"state{number}") is None:
            continue
        for codes, absmax in _moments(flat, number, part):
            slot = next(names, None)
            if slot is None:
                raise CheckpointError(
                    "a state of bitsandbytes with more moments than the optimizer that loads it"
                )
            if absmax is None:
                found[slot.name] = codes
                continue
            spec = _spec_of(flat[f"qmap{number}"])
            found[slot.name] = _quantized(codes, absmax, spec, part)
    return found


def _moments(
    flat: dict[str, Any], number: int, part: Tensor
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(values, None) or (codes, scales) of each moment in one buffer."""
    values = flat[f"state{number}"]
    absmax = flat.get(f"absmax{number}") if values.dtype == torch.uint8 else None
    if values.numel() == 2 * part.numel() and values.shape != part.shape:
        for half in range(2):
            yield values[half], None if absmax is None else absmax[half]
    else:
        yield values, absmax


def _spec_of(values: Tensor) -> Spec:
    """The format whose table of values this is; also averages of squares may be in the signed one."""
    for signed, spec in ((True, _DYNAMIC.signed), (False, _DYNAMIC.unsigned)):
        table = torch.tensor(dynamic_values(8, signed), dtype=torch.float32)
        if isinstance(spec, Spec) and torch.equal(values.cpu().float(), table):
            return spec
    raise CheckpointError(
        "a state of bitsandbytes whose qmap is not its dynamic map; only that one can be loaded"
    )


def _quantized(codes: Tensor, absmax: Tensor, spec: Spec, part: Tensor) -> QTensor:
    blocks = -(-part.numel() // spec.block[0])
    if absmax.numel() != blocks or codes.numel() != part.numel():
        raise CheckpointError(
            f"a state of bitsandbytes with {codes.numel()} codes and {absmax.numel()} scales for a "
            f"parameter of {part.numel()} elements, of which {spec.block[0]} share a scale"
        )
    parts = {"qdata": codes.reshape(-1), "scale": absmax.reshape(-1).float()}
    return QTensor(parts, spec, tuple(part.shape), torch.float32)
