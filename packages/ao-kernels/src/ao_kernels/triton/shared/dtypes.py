"""Dtypes that several kernels take."""

from __future__ import annotations

import torch

__all__ = ["ELEMENTS", "INPUTS"]

#: dtypes of activations, as the assembly calls them
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
