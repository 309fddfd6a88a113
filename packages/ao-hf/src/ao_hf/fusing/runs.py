"""Consecutive fused blocks as one op: the first one runs them all, and the others return what it found."""

from __future__ import annotations

from itertools import repeat
from operator import contains, is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ao_core.ext.kernels import (
    Attention,
    CachedBlock,
    CachedBlocks,
    Decoded,
    KeysAndValues,
    OutputHead,
    pinned_band,
)
from ao_hf.cache.ahead import Ahead
from ao_hf.cache.attention import UNREAD, attention
from ao_hf.cache.caches import AoCache
from ao_hf.cache.layers import AoLayer, AoStaticLayer
from ao_hf.cache.masks import bounds_of
from ao_hf.cache.names import ATTENTION
from ao_hf.fusing.block import FusedBlock, listens

__all__ = ["SDPA", "Run", "install_runs"]

#: rows (batch × tokens) of a step, at most: of more, what all blocks return is too much memory
_MOST_ROWS = 64
#: arguments of attention functions that the op knows
_KNOWN = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal"})
#: of all modules
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_LAYERS = (AoLayer, AoStaticLayer)
#: the attention of torch, as transformers calls it
SDPA = "sdpa"
#: arguments of attention functions that "sdpa" does not know, or knows as masks
_MORE = ("sliding_window", "softcap", "s_aux")


class _Plan(NamedTuple):
    """Blocks from `first` on with the caches of their layers."""

    first: int
    layers: tuple[AoLayer, ...]
    #: what the layers hold; another one, and the plan is void
    caches: tuple[Any, ...]
    call: CachedBlocks
    #: the same with the head that follows the last block of the run; None where it is not served
    whole: CachedBlocks | None


class Run:
    """Consecutive fused blocks, for a few tokens over an `AoCache`.

    Whatever a step needs that the op does not do, the blocks do one by one: outputs of inner modules, tokens
    that complete a block of the cache, masks that are not from a start to a stop. What each block returns is
    the same, so models that stop early get what they should.
    """

    def __init__(self, blocks: list[FusedBlock]) -> None:
        self.blocks = blocks
        #: what follows the last block, where logits are wanted and nothing else
        self.head: OutputHead | None = None
        #: whether attention is softmax(scale · q·k) and nothing more, which "sdpa" computes too
        self.is_plain = all(b.options.get(name) is None for b in blocks for name in _MORE)
        self._configs = {id(b.attention.config): b.attention.config for b in blocks}.values()
        self._plans: WeakKeyDictionary[AoCache, dict[int, _Plan | None]] = WeakKeyDictionary()
        checks = [check for block in blocks for check in block.checks()]
        self._found = tuple(zip(*checks, strict=True))
        self._hooks = tuple(hooks for block in blocks for hooks in block.hooks)
        modules = [block.module for block in blocks]
        #: of blocks, which may change in place what blocks return
        self._between = (
            *(hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)),
            *(hooks for name, hooks in vars(nn_module).items() if name in _GLOBAL_HOOKS),
        )
        self._inner = tuple(inner for block in blocks for inner in block.inner)

    def step(self, place: int, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """What block number `place` returns; None: it must run itself."""
        cache = kwargs.get("past_key_values")
        if type(cache) is not AoCache:
            return None
        ahead = cache.ahead
        if ahead is not None:
            found = ahead.next(self, place, x, kwargs)
            if found is not None:
                cache.reached(ahead)
                return found
            cache.settle()
        index = self.blocks[place].index
        if not cache.runs_ahead or index >= len(cache.layers):
            return None
        if getattr(cache.layers[index], "kv", None) is None:
            return None  # of an empty cache, most of all for a prompt
        plan = self._plan_of(place, x, cache) if self._applies(x, cache, kwargs) else None
        return None if plan is None else self._start(plan, x, cache, kwargs)

    def logits(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The logits of what all blocks make of `x`, given the first one's arguments; None: they must run.

        Args:
            x: (B, T, K).
            kwargs: of the first block; over an `AoCache`.
        """
        cache: AoCache = kwargs["past_key_values"]
        if cache.ahead is not None or not cache.runs_ahead or not self._applies(x, cache, kwargs):
            return None
        plan = self._plan_of(0, x, cache)
        if plan is None or plan.whole is None:
            return None
        made = _called(plan, plan.whole, x, cache, kwargs, len(plan.layers))
        return None if made is None else made.logits

    def _start(
        self, plan: _Plan, x: Tensor, cache: AoCache, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Run blocks from the first one of a plan on."""
        made = _called(plan, plan.call, x, cache, kwargs, 1)
        if made is None:
            return None
        ahead = Ahead(self, plan.first, made.blocks, kwargs, plan.layers, x.shape[1])
        cache.ahead = ahead
        cache.reached(ahead)
        return ahead.outputs[0]

    def _applies(self, x: Tensor, cache: AoCache, kwargs: dict[str, Any]) -> bool:
        """Whether nothing but what blocks return is wanted, and all is as it was found."""
        if (
            torch.is_grad_enabled()
            or torch._C._is_any_autocast_enabled()
            or pinned_band() is not None
        ):
            return False
        if x.dim() != 3 or not x.is_cpu or not 0 < x.shape[0] * x.shape[1] <= _MOST_ROWS:
            return False
        for name, value in kwargs.items():
            if name not in _GIVEN and value is not None:
                return False
        if kwargs.get("output_attentions"):
            return False
        if not self._attends(x, cache):
            return False
        if any(map(contains, self._inner, repeat("forward"))):
            return False
        dictionaries, names, expected = self._found
        if not all(map(is_, map(dict.get, dictionaries, names), expected)):
            return False
        if any(self._between) and listens(self._between):
            return False
        return not any(self._hooks) or all(block.applies() for block in self.blocks)

    def _attends(self, x: Tensor, cache: AoCache) -> bool:
        """Whether the op computes what the attention of the model does."""
        names = {config._attn_implementation for config in self._configs}
        if names == {ATTENTION}:
            return ALL_ATTENTION_FUNCTIONS.get_interface(ATTENTION, None) is attention
        # of exact tokens, one query that sees them all; masks of more than that are not from start to stop
        if names != {SDPA} or x.shape[1] != 1 or not cache.is_exact or not self.is_plain:
            return False
        return ALL_ATTENTION_FUNCTIONS.get_interface(SDPA, None) is sdpa_attention_forward

    def refuses(self, cache: AoCache, x: Tensor) -> str | None:
        """Why one token `x` (1, 1, K) would not be decoded by one op over this empty cache; None: it would.

        It leaves a token of zeros in the cache.
        """
        if [block.index for block in self.blocks] != list(range(len(cache.layers))):
            return f"{len(self.blocks)} of {len(cache.layers)} layers run as one op"
        for layer, block in zip(cache.layers, self.blocks, strict=True):
            if type(layer) is not AoLayer:
                return f"layer {block.index} keeps no whole text, but a {type(layer).__name__}"
            zeros = x.new_zeros(1, block.heads.key, 1, block.heads.dim)
            layer.update(zeros, zeros)
        plan = self._planned(0, x, cache)
        if plan is None or len(plan.layers) < len(self.blocks):
            return "no kernel decodes with these formats and this attention"
        return None

    def _plan_of(self, place: int, x: Tensor, cache: AoCache) -> _Plan | None:
        """The plan for the longest run that begins with a block; None where none begins with it."""
        plans = self._plans.setdefault(cache, {})
        plan = plans.get(place)
        if plan is not None and all(map(is_, plan.caches, [layer.kv for layer in plan.layers])):
            kv = plan.caches[0]
        else:
            plan = plans[place] = self._planned(place, x, cache)
            if plan is None:
                return None
            kv = plan.caches[0]
        fits = kv.dtype == x.dtype and kv.batch == x.shape[0]
        return plan if fits else None

    def _planned(self, place: int, x: Tensor, cache: AoCache) -> _Plan | None:
        if place and _is_served(self.blocks[place - 1], cache):
            return None  # a block before it should have begun
        layers = []
        for block in self.blocks[place:]:
            if not _is_served(block, cache):
                break
            layers.append(cache.layers[block.index])
        if not layers:
            return None
        blocks = self.blocks[place : place + len(layers)]
        with torch.inference_mode(False):
            made = [_cached(b, layer.kv) for b, layer in zip(blocks, layers, strict=True)]
        call = CachedBlocks(tuple(made))
        if not call.has_kernel(x):
            return None
        whole = None
        if self.head is not None and len(layers) == len(self.blocks):
            whole = CachedBlocks(call.blocks, self.head)
            whole = whole if whole.has_kernel(x) else None
        return _Plan(place, tuple(layers), tuple(layer.kv for layer in layers), call, whole)


#: arguments of a block that attention does not read, or that the op knows
_GIVEN = UNREAD | {"past_key_values", "attention_mask", "position_embeddings"}


def _is_served(block: FusedBlock, cache: AoCache) -> bool:
    """Whether the op can run a block with its layer of a cache."""
    if block.index >= len(cache.layers):
        return False
    layer = cache.layers[block.index]
    if type(layer) not in _LAYERS or layer.kv is None or layer.index != block.index:
        return False
    options = {name: x for name, x in block.options.items() if x is not None and name not in UNREAD}
    if not options.keys() <= _KNOWN or options.get("dropout"):
        return False
    sinks = options.get("s_aux")
    if sinks is not None and sinks.dtype != torch.float32:
        return False  # the op would keep a copy
    causal = options.get("is_causal", getattr(block.attention, "is_causal", True))
    same = layer.kv.key.shape[3] == layer.kv.value.shape[3] == block.heads.dim
    return bool(causal) and same and layer.kv.key.shape[1] == block.heads.key


def _cached(block: FusedBlock, kv: Any) -> CachedBlock:
    """A block and the cache of its layer, as the op takes them."""
    options = block.options
    scale = options.get("scaling")
    attention = Attention(
        float(block.heads.dim**-0.5 if scale is None else scale),
        True,
        options.get("sliding_window") or 0,
        float(options.get("softcap") or 0.0),
    )
    cache = KeysAndValues(
        kv.key.tensor(), kv.value.tensor(), kv.counts, kv.tail_key, kv.tail_value, kv.center
    )
    return block.cached(cache, options.get("s_aux"), attention)


def _called(
    plan: _Plan,
    call: CachedBlocks,
    x: Tensor,
    cache: AoCache,
    kwargs: dict[str, Any],
    reached: int,
) -> Decoded | None:
    """What one call makes for the blocks of a plan, of which the model came to so many; None: it cannot."""
    mask, tables = kwargs.get("attention_mask"), kwargs.get("position_embeddings")
    bounds = bounds_of(mask)
    if not isinstance(tables, tuple) or (
        mask is not None and (bounds is None or not bounds.causal)
    ):
        return None
    if not _has_room(plan, x.shape[1]):
        return None
    start, stop = (None, None) if bounds is None else (bounds.start, bounds.stop)
    layers = plan.layers
    with cache.writing(layers[0].index, layers[reached - 1].index):
        made = call(x, tables[0], tables[1], start, stop)
    for layer in layers:
        if type(layer) is AoLayer:
            layer.tokens += x.shape[1]
    return made


def _has_room(plan: _Plan, new: int) -> bool:
    """Whether the tails take so many tokens, and no block of them becomes due."""
    layer, kv = plan.layers[0], plan.caches[0]
    tokens, coded = kv.counts.tolist()
    if layer.functions.coded_tokens(tokens + new, kv.window) > coded:
        return False
    if isinstance(layer, AoStaticLayer) and tokens + new > layer.max_cache_len:
        return False
    alike = len({each.tokens for each in plan.layers}) == 1
    return alike and all(each.trial is None for each in plan.layers)


def install_runs(blocks: list[FusedBlock]) -> list[Run]:
    """Let consecutive blocks run as one op; blocks are in the order of the model.

    Consecutive are those that got what the one before returned, with the same arguments else.
    """
    groups: list[list[FusedBlock]] = []
    for block in blocks:
        if block.is_whole and groups and block.follows(groups[-1][-1]):
            groups[-1].append(block)
        elif block.is_whole:
            groups.append([block])
    runs = []
    for group in groups:
        run = Run(group)
        for place, block in enumerate(group):
            block.run_of = (run, place)
        runs.append(run)
    return runs
