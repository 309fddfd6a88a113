"""Fake-quantize rules of formats that choose more than scales."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from ao_core import Spec
from ao_core.ext.compute import FakeQuantize, register_fake_quantize, straight_through_by
from ao_quant.configs.gguf import GGUF_TYPES
from ao_quant.gguf.encode import encode

__all__ = ["gguf_rule"]


def gguf_rule(kind: str) -> str:
    """The name of the rule by which weights in training are rounded to a GGUF type."""
    return f"gguf_{kind}"


def _apply(kind: str, values: Tensor, spec: Spec, extras: Mapping[str, Tensor]) -> Tensor:
    return straight_through_by(values, spec, partial(encode, kind))


for _kind in GGUF_TYPES:
    register_fake_quantize(FakeQuantize(gguf_rule(_kind), None, partial(_apply, _kind)))
