"""Custom ops, defined by their schema: torch's registry calls the implementation, with no Python in between.

`torch.library.custom_op` would put several layers of Python around each call, which a token of a decoder
pays for hundreds of times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["DEFINED", "define"]

_LIBRARY = torch.library.Library("ao_kernels", "FRAGMENT")
#: name → op, of all that have been defined; a test runs the fake of each with symbolic sizes
DEFINED: dict[str, Any] = {}


def define(schema: str, fn: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The op of a schema, which `fn` computes, on the CPU in Triton's interpreter.

    Args:
        schema: "name(Tensor x, …) -> Tensor", without a namespace. No result is an alias of an argument.
        fn: called with the arguments in the order of the schema.
        fake: makes results of the right shapes, dtypes and strides, also where sizes are symbols.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, fn, key)
    torch.library.register_fake(f"ao_kernels::{name}", fake, lib=_LIBRARY)
    DEFINED[name] = getattr(torch.ops.ao_kernels, name).default
    return DEFINED[name]
