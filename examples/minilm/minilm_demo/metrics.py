"""How far the vectors of a variant are from those of the original, and what that does to retrieval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Quality:
    """What a variant's vectors are worth beside the original's."""

    #: energy of the original's vectors over that of the differences, dB; inf where there are none
    output_sqnr_db: float
    cosine_mean: float
    cosine_min: float
    #: share of queries whose own document is the nearest
    accuracy: float
    #: share of queries that find the same document as with the original
    agreement: float


def quality(
    queries: Tensor, documents: Tensor, original_queries: Tensor, original_documents: Tensor
) -> Quality:
    """Compare vectors (texts, size) with the original's; query i belongs to document i."""
    found = nearest(queries, documents)
    vectors = torch.cat([queries, documents]).double()
    original = torch.cat([original_queries, original_documents]).double()
    cosine = F.cosine_similarity(vectors, original, dim=-1)
    own = torch.arange(len(queries))
    return Quality(
        output_sqnr_db=sqnr_db(original, vectors),
        cosine_mean=float(cosine.mean()),
        cosine_min=float(cosine.min()),
        accuracy=float((found == own).double().mean()),
        agreement=float((found == nearest(original_queries, original_documents)).double().mean()),
    )


def nearest(queries: Tensor, documents: Tensor) -> Tensor:
    """The index of the document with the largest inner product; the first of equals."""
    return (queries.double() @ documents.double().T).argmax(dim=1)


def sqnr_db(original: Tensor, approximation: Tensor) -> float:
    """``10 log10(sum(x²) / sum((x - y)²))``."""
    noise = float((original - approximation).square().sum())
    return 10 * math.log10(float(original.square().sum()) / noise) if noise else math.inf
