"""For kernels: selection, parts and their values, activations, shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.dispatch import (
    BANDS,
    Candidate,
    candidates,
    fingerprint,
    pinned_band,
    run,
    select,
    unused,
)
from ao_core.layouts import has_foreign_zeros
from ao_core.lazy import lazy_names
from ao_core.neutral import neutral
from ao_core.tensor.activations import lost_rows, static_qparams, static_qparams_of_range
from ao_core.tensor.attention import AttendCall, Attention, attend_call
from ao_core.tensor.autocast import autocasted
from ao_core.tensor.blocks import (
    GAINS,
    GATES,
    BlockCall,
    BlockOp,
    Heads,
    NormBefore,
    Projection,
)
from ao_core.tensor.codec import decode_parts, decode_reference, scale_values, unpack_parts
from ao_core.tensor.cut import geometry, narrow, part_size
from ao_core.tensor.decoder import (
    CachedBlock,
    CachedBlocks,
    Decoded,
    DecoderCall,
    KeysAndValues,
    OutputHead,
)
from ao_core.tensor.encoding import encode_parts, encode_reference, fake_quantize_reference
from ao_core.tensor.joined import cannot_join_rows, join_rows, share_rows
from ao_core.tensor.leaves import Leaves, spec_of_text
from ao_core.tensor.matmuls import select_linear
from ao_core.tensor.nibbles import upper_nibbles
from ao_core.tensor.rounded import rounded_activations
from ao_core.tensor.scaled import quantize_scaled_reference
from ao_core.tensor.sharding import is_sharded, local_shard, local_shards, shard_like
from ao_core.tensor.tail import EncodeTokensCall, WriteTailCall, encode_tokens, write_tail
from ao_core.tensor.transforms import is_transforming
from ao_core.tensor.updates import current_generator
from ao_core.tensor.writes import overwrite
from ao_core.torch_kernels.blocks import normed
from ao_core.torch_kernels.devices import lacks_capability
from ao_core.torch_kernels.learned import learned_gradients_reference
from ao_core.torch_kernels.linear import quantized_activations

if TYPE_CHECKING:
    from ao_core.tensor.rotation import hadamard_spec

__all__ = [
    "BANDS",
    "GAINS",
    "GATES",
    "AttendCall",
    "Attention",
    "BlockCall",
    "BlockOp",
    "CachedBlock",
    "CachedBlocks",
    "Candidate",
    "Decoded",
    "DecoderCall",
    "EncodeTokensCall",
    "Heads",
    "KeysAndValues",
    "Leaves",
    "NormBefore",
    "OutputHead",
    "Projection",
    "WriteTailCall",
    "attend_call",
    "autocasted",
    "candidates",
    "cannot_join_rows",
    "current_generator",
    "decode_parts",
    "decode_reference",
    "encode_parts",
    "encode_reference",
    "encode_tokens",
    "fake_quantize_reference",
    "fingerprint",
    "geometry",
    "hadamard_spec",
    "has_foreign_zeros",
    "is_sharded",
    "is_transforming",
    "join_rows",
    "lacks_capability",
    "learned_gradients_reference",
    "local_shard",
    "local_shards",
    "lost_rows",
    "narrow",
    "neutral",
    "normed",
    "overwrite",
    "part_size",
    "pinned_band",
    "quantize_scaled_reference",
    "quantized_activations",
    "rounded_activations",
    "run",
    "scale_values",
    "select",
    "select_linear",
    "shard_like",
    "share_rows",
    "spec_of_text",
    "static_qparams",
    "static_qparams_of_range",
    "unpack_parts",
    "unused",
    "upper_nibbles",
    "write_tail",
]

#: its module imports torch's compiler, which takes longer than quantizing a small model
_MODULES = {"hadamard_spec": "ao_core.tensor.rotation"}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
