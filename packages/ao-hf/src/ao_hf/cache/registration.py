"""Registers the attention and its mask with transformers; imported when `transformers.modeling_utils` is."""

from __future__ import annotations

from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ao_hf.cache.attention import attention
from ao_hf.cache.masks import mask
from ao_hf.cache.names import ATTENTION

AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, mask)
