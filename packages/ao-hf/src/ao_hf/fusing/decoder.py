"""What surrounds the decoder blocks of a model, for one token of each text: tables, and no mask."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ao_hf.cache.layers import AoLayer, AoStaticLayer
from ao_hf.cache.masks import hides, padding_of
from ao_hf.cache.names import ATTENTION
from ao_hf.fusing.block import _Forward
from ao_hf.fusing.observe import Observed, Seen
from ao_hf.fusing.structure import NotFused, plain

__all__ = ["FusedDecoder", "RotaryTables", "decoder_parts"]

#: rows of a table at first
_FIRST = 512
#: attentions that need no mask for one query
_UNMASKED = ("sdpa", "eager", ATTENTION)
#: layers of caches that keep all tokens, and give attention no others
_KEEPING = (DynamicLayer, AoLayer, AoStaticLayer)
#: what the blocks are told, and the forward of a decoder gets or makes
_TOLD = frozenset({
    "attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings",
})  # fmt: skip


#: entries of the model's configuration that each call looks at
_LOOKED_AT = frozenset({
    "_attn_implementation_internal", "_output_attentions", "output_hidden_states", "return_dict",
})  # fmt: skip


class RotaryTables:
    """Cosines and sines of a rotary embedding, by position.

    Args:
        module: the rotary embedding, called with hidden states and positions (1, T).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        #: for hidden states of a dtype and device, (rows, D) each
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, ...]] = {}

    def __call__(self, x: Tensor, positions: Tensor, room: int) -> tuple[Tensor, ...] | None:
        """What the module returns for `x` and positions (B, T); None where a table cannot say it.

        What is recorded here is used for all positions of a cache that has room for so many.
        """
        rows = max(int(positions.max()) + 1, room)
        key = x.dtype, x.device
        tables = self._tables.get(key)
        if tables is None or rows > len(tables[0]):
            tables = _tables(self._module, x, max(_FIRST, 1 << (rows - 1).bit_length()))
            if tables is None:
                return None
            self._tables[key] = tables
        return tuple(torch.embedding(table, positions) for table in tables)


def _tables(module: nn.Module, x: Tensor, rows: int) -> tuple[Tensor, ...] | None:
    """Tables of so many rows; None where they are not what the module returns for single positions."""
    # tensors that are made in inference mode could not be used outside of it
    with torch.inference_mode(False), torch.no_grad():
        like, positions = x.new_empty(1, 1, x.shape[-1]), torch.arange(rows, device=x.device)[None]
        tables = module(like, positions)
        for place in (0, 1, rows // 2 - 1, rows - 1):
            single = module(like, positions[:, place : place + 1])
            for table, row in zip(tables, single, strict=True):
                if not torch.equal(table[:, place : place + 1], row):
                    return None  # its frequencies depend on the length of the text
    return tuple(table[0] for table in tables)


class FusedDecoder(_Forward):
    """The forward of the module that embeds tokens, calls the blocks, and norms what they return.

    Args:
        module: the decoder.
        embedding: of tokens.
        rotary: the rotary embedding.
        blocks: in the order of their calls.
        norm: after the blocks.
        result: the class of its outputs.
    """

    ops = ("no mask, and rotary embedding from a table, for one token",)

    def __init__(
        self,
        module: Any,
        embedding: nn.Module,
        rotary: nn.Module,
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        result: type,
    ) -> None:
        super().__init__(module, [rotary], [])
        self._embedding, self.blocks, self.norm = embedding, tuple(blocks), norm
        self._tables, self._result = RotaryTables(rotary), result
        #: what may not change, such as how many blocks are called
        self._settings = {n: x for n, x in vars(module.config).items() if n not in _LOOKED_AT}
        parts = [embedding, *blocks, norm]
        self._places += [
            (parent._modules, name, child)
            for parent in module.modules()
            for name, child in parent._modules.items()
            if any(child is one for one in parts)
        ]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The same without a mask, and without computing cosines; NotImplemented where a mask is needed."""
        begun = None if args else self.begin(**kwargs)
        if begun is None:
            return NotImplemented
        x, told = begun
        for block in self.blocks:
            x = block(x, **told)
        return self._result(last_hidden_state=self.norm(x), past_key_values=told["past_key_values"])

    def begin(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        pads: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]] | None:
        """What the first block is given, and what all are told; None where a mask is needed.

        With `pads`, for a run over an `AoCache`, padding at the ends of rows is told as "ao_kv" has it.
        """
        cache = past_key_values
        if (
            input_ids is None
            or input_ids.dim() != 2
            or input_ids.shape[1] != 1
            or cache is None
            or use_cache is False
            or any(x is not None and x is not False for x in kwargs.values())
            or not self._reads(cache)
        ):
            return None
        padding = None
        if hides(attention_mask):
            padding = _padding(attention_mask, cache) if pads else None
            if padding is None:
                return None
        if position_ids is None:
            position_ids = torch.full_like(input_ids, int(cache.get_seq_length()))
        if position_ids.dim() != 2:
            return None
        x = self._embedding(input_ids)
        rows = self._tables(x, position_ids, cache.get_max_length())
        if rows is None:
            return None
        return x, {
            "attention_mask": padding,
            "position_embeddings": rows,
            "position_ids": position_ids,
            "past_key_values": cache,
            "use_cache": True,
        }

    def _reads(self, cache: Any) -> bool:
        """Whether one query needs no mask: all layers keep all tokens and nothing else."""
        config = vars(self.module.config)
        if any(config.get(name) != value for name, value in self._settings.items()):
            return False
        if config.get("_output_attentions") or config.get("output_hidden_states"):
            return False
        if not getattr(self.module.config, "return_dict", True):
            return False
        if config.get("_attn_implementation_internal") not in _UNMASKED:
            return False
        kind = type(cache.layers[0]) if cache.layers else DynamicLayer
        return kind in _KEEPING and all(map(is_, map(type, cache.layers), repeat(kind)))


def _padding(mask: Any, cache: Any) -> Tensor | None:
    """A mask (B, tokens) as "ao_kv" has it; None: it cannot."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    return padding_of(mask) if mask.shape[1] == int(cache.get_seq_length()) + 1 else None


def decoder_parts(model: Any, names: Sequence[str], observed: Observed) -> FusedDecoder:
    """The module that calls the blocks of these names, and what it does with them.

    Raises:
        NotFused: it does more than embed, call the blocks, and norm.
    """
    blocks = [model.get_submodule(name) for name in names]
    owners = {name.rpartition(".")[0].rpartition(".")[0] for name in names}
    if len(owners) != 1:
        raise NotFused("its blocks are not in one list")
    decoder = model.get_submodule(*owners)
    plain(decoder)
    calls = [observed.calls[block] for block in blocks]
    if any(len(seen) != 2 for seen in calls) or len(observed.calls[decoder]) != 2:
        raise NotFused("blocks are not called once for each run")
    step = [seen[1] for seen in calls]
    x = step[0].x
    embedding = _maker(decoder, x, observed, "the first block does not read an embedding")
    for one, after in pairwise(step):
        if after.x is not one.output:
            raise NotFused("a block reads something else than what the one before returned")
    for one in step:
        _check_told(one, step[0])
    table = step[0].kwargs.get("position_embeddings")
    rotary = _maker(decoder, table, observed, "blocks get no rotary tables")
    norm = next(
        (m for m in decoder.children() if _seen(m, observed).x is step[-1].output), None
    )  # fmt: skip
    result = observed.calls[decoder][1].output
    if (
        norm is None
        or getattr(result, "last_hidden_state", None) is not _seen(norm, observed).output
    ):
        raise NotFused("what it returns is not a norm of the last block")
    found = FusedDecoder(decoder, embedding, rotary, blocks, norm, type(result))
    _check(found, model, observed)
    return found


def _seen(module: nn.Module, observed: Observed) -> Seen:
    """The call for the one token, or an empty one."""
    calls = observed.calls.get(module, [])
    return calls[1] if len(calls) == 2 else Seen((), {}, None)


def _maker(decoder: nn.Module, x: Any, observed: Observed, otherwise: str) -> nn.Module:
    for child in decoder.children():
        if x is not None and _seen(child, observed).output is x:
            plain(child)
            return child
    raise NotFused(otherwise)


def _check_told(one: Seen, first: Seen) -> None:
    for name, value in one.kwargs.items():
        if name not in _TOLD and value:
            raise NotFused(f"its blocks are told {name}")
        if value is not first.kwargs.get(name):
            raise NotFused(f"its blocks are told different {name}")


def _check(found: FusedDecoder, model: Any, observed: Observed) -> None:
    """Raise `NotFused` unless it returns, bit for bit, what the decoder does for one token."""
    first, second = (seen.kwargs for seen in observed.calls[found.module])
    outs: list[Any] = []
    for forward in (found.run, type(found.module).forward.__get__(found.module)):
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        given = [{**seen, "past_key_values": cache} for seen in (first, second)]
        type(found.module).forward(found.module, **given[0])
        out = forward(**given[1])
        outs.append(None if out is NotImplemented else out.last_hidden_state)
    if outs[0] is None or not torch.equal(*outs):
        raise NotFused("a token gets other hidden states without a mask, or with rotary tables")
