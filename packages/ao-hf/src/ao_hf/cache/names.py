"""Names that several modules of this folder know."""

from __future__ import annotations

__all__ = ["ATTENTION", "EXACT"]

#: of the attention and of its mask, for `model.set_attn_implementation`
ATTENTION = "ao_kv"
#: of caches that round nothing
EXACT = "exact"
