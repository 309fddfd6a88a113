"""`two_four_cslt`: a 2:4 weight as cuSPARSELt compresses it, in its own order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ao_core import Layout
from ao_core.ext import Parts, UnsupportedOp, make_parts, registry

if TYPE_CHECKING:
    from ao_core import DType, Spec

__all__ = ["Cslt"]

#: of a number format: what rows and columns of a weight must be multiples of
_STEPS = {"bf16": 16, "fp16": 16, "int8": 32}
#: columns that are read back at a time
_COLUMNS = 4096


class Cslt(Layout):
    """Two values of every four, as cuSPARSELt compresses a weight (N, K) on the GPU that multiplies by it.

    Parts: qdata, its values and metadata as one tensor of `aten._cslt_compress`; the scale of `two_four`.
    A matmul with the identity gives the values back; only -0.0 becomes 0.0.
    """

    name = "two_four_cslt"
    canonical = False
    canonical_name = "two_four"
    auto_devices = ("cuda",)
    conversion_devices = ("cuda",)

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        if spec.dtype not in _STEPS or spec.zero_point != "none":
            return f"holds {', '.join(_STEPS)} without a zero point, found {spec}"
        step = _STEPS[spec.dtype]
        if len(shape) != 2 or 0 in shape or any(size % step for size in shape):
            return f"needs a 2-D weight with sizes in multiples of {step}, found {shape}"
        return None

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        if not (parts["qdata"].is_cuda or parts["qdata"].is_meta):
            raise UnsupportedOp(
                f"layout {self.name!r} is made by cuSPARSELt, on a GPU; found {parts['qdata'].device}"
            )
        codes, scale, _ = registry.layouts.get("two_four").unpack(parts, spec, shape, dtype)
        return make_parts(torch._cslt_compress(codes.view(dtype.storage)), scale, None)

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        identity = torch.eye(shape[1], dtype=dtype.storage, device=parts["qdata"].device)
        columns = [
            torch._cslt_sparse_mm(parts["qdata"], some.contiguous())
            for some in identity.split(_COLUMNS, 1)
        ]
        codes: Tensor = torch.cat(columns, 1).view(dtype.code_dtype)
        return registry.layouts.get("two_four").pack(codes, parts.get("scale"), None, spec, dtype)
