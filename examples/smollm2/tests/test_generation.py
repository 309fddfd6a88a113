"""The figures of the example are of the cache, on a small model with random weights."""

from __future__ import annotations

from typing import Any

import generation
import pytest
import torch
from smollm2 import model

METADATA = {
    "llama.vocab_size": 97,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 2048,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
}


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Any:
    def tokens(text: str) -> torch.Tensor:
        return torch.tensor([ord(x) % 97 for x in text])

    monkeypatch.setattr(model, "tokens", tokens)
    made: Any = model.from_metadata(METADATA).eval()
    made.set_attn_implementation("ao_kv")
    return made


def test_chunks(network: Any, capsys: pytest.CaptureFixture[str]) -> None:
    generation.chunks(network, ["kv8", "kv4"], context=200)
    rows = [
        [x.strip() for x in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    assert [row[:2] for row in rows[2:]] == [
        [kv, n] for kv in ("kv8", "kv4") for n in ("200", "64", "1")
    ]
    for name, _, kl, share, again in rows[2:]:
        assert 0 <= float(kl) <= (1e-3 if name == "kv8" else 0.05)
        assert float(share) >= (0.9 if name == "kv8" else 0.8)
        assert again == "True"


def test_text(network: Any, capsys: pytest.CaptureFixture[str]) -> None:
    generation.text(network, ["exact"], count=8)
    assert capsys.readouterr().out == "exact: the first 8 of 8 greedy tokens are the same\n"


def test_needle(network: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hay = generation.haystack(1500)
    assert len(hay) == 1500
    for start, end in generation.NEEDLES:
        said = model.tokens(start + end)
        assert any(torch.equal(x, said) for x in hay.unfold(0, len(said), 1))
    generation.needle(network, ["exact", "kv8"], context=400)
    lines = capsys.readouterr().out.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert len(lines) == 8
    for exact, kv8 in zip(values[:4], values[4:], strict=True):
        assert abs(exact - kv8) < 0.05
