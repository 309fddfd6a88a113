"""Whether parts, which may be anybody's, make a quantized tensor: asked before one is loaded or saved."""

from __future__ import annotations

from functools import lru_cache

import torch

from ao_core.errors import AoError, CheckpointError
from ao_core.layouts import Parts, check_spec, unlike
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.beside import beside_forms, beside_names
from ao_core.tensor.codec import decode_parts
from ao_core.tensor.encoding import encode_reference
from ao_core.tensor.input_steps import misfit, wrong_steps
from ao_core.tensor.options import check_options

__all__ = ["OUTWARD", "check_fit"]

#: what the values of a quantized tensor can be given as
OUTWARD = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: columns of activations that are tried
_COLUMNS = 64


def check_fit(
    fqn: str, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise `CheckpointError` unless these are the parts of such a tensor, of stored `shape`.

    Raises:
        UnknownNameError: nobody registered a number format or layout.
    """
    layout, format_ = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    names = beside_names(spec)
    of_layout = {name: part for name, part in parts.items() if name not in names}
    try:
        check_options(spec)
        reason = (
            _never(spec, dtype, canonical=layout.canonical)
            or layout.refuses(spec, shape, format_)
            or layout.check_parts(of_layout, spec, shape, format_)
            or unlike({n: parts[n] for n in names if n in parts}, beside_forms(spec, shape))
            or misfit(spec, shape)
            or wrong_steps(parts)
            or (None if spec.act is None else _unusable(spec.act))
        )
    except Exception as error:  # of a plugin too: what it cannot judge is not let in
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise CheckpointError(f"{fqn} is not {spec} of {shape}: {reason}")


def _never(spec: Spec, dtype: torch.dtype, *, canonical: bool) -> str | None:
    """Why no checkpoint has such a tensor."""
    if dtype not in OUTWARD:
        known = ", ".join(str(known).removeprefix("torch.") for known in OUTWARD)
        return f"dtype={str(dtype).removeprefix('torch.')} is not one of {known}"
    if not canonical:
        return f"the layout {spec.layout!r} is made for a kernel, and not for checkpoints"
    return None


@lru_cache(maxsize=256)
def _unusable(act: Spec) -> str | None:
    """Why activations cannot be quantized so, tried on a few zeros."""
    if act.act is not None:
        return f"act.act={act.act}: activations of activations"
    x = torch.zeros(1, _COLUMNS, device="cpu")
    layout, dtype = registry.layouts.get(act.layout), registry.dtypes.get(act.dtype)
    try:
        check_spec(act, dtype)
        if reason := layout.refuses(act, tuple(x.shape), dtype):
            return f"act={act}: {reason}"
        with torch.inference_mode():
            # where the scales of blocks share a static one, it is not chosen
            shared = torch.ones(1, 1) if act.is_static and not act.static else None
            decode_parts(encode_reference(x, act, shared), act, tuple(x.shape), x.dtype)
    except AoError as error:
        return f"act={act}: {error}"
    return None
