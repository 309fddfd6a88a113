"""What surrounds fused blocks, for one token: when it replaces the decoder's own code, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_models import build, logits, served_calls
from torch import Tensor
from transformers import DynamicCache

import ao_hf
from ao_hf import AoCache
from ao_hf.fusing import decoder
from ao_hf.fusing.decoder import FusedDecoder
from ao_hf.fusing.logits import FusedModel
from ao_hf.fusing.report import Fused, Kept

LONG = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def own_forward(model: Any) -> Any:
    """The same model, whose decoder runs its own code around fused blocks."""
    del model.model.forward
    return model


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a fused decoder, whether it did not call the decoder's own code."""
    found = served_calls(monkeypatch, FusedDecoder)
    # else one op makes logits, and the decoder is not called
    monkeypatch.setattr(FusedModel, "run", lambda *args, **kwargs: NotImplemented)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "kv", "attention"),
    [("Llama", None, "sdpa"), ("Qwen2", "kv8", "ao_kv"), ("Qwen3", "kv8", "sdpa"), ("Llama", None, "eager")],
)  # fmt: skip
def test_tokens_are_the_same_bit_for_bit(
    kind: str, kv: str | None, attention: str, dtype: torch.dtype, runs: list[bool]
) -> None:
    model = build(kind, dtype)
    report = ao_hf.fuse(model)
    assert report.around == Fused("model", FusedDecoder.ops)
    assert "no mask" in str(report)
    model.set_attn_implementation(attention)

    def generated() -> tuple[Tensor, Tensor]:
        options = {} if kv is None else {"past_key_values": AoCache(model.config, kv)}
        return logits(model, batch=2, tokens=20, **options)

    runs.clear()
    found = generated()
    assert (runs[0], sum(runs)) == (False, 19)  # but for the prompt
    for ours, own in zip(found, generated_without(model, generated), strict=True):
        assert torch.equal(ours, own)


def generated_without(model: Any, generated: Any) -> Any:
    own_forward(model)
    return generated()


def test_positions_beyond_the_table_and_of_other_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_FIRST", 4)
    model = build("Llama", max_position_embeddings=32)
    ao_hf.fuse(model)

    def made() -> Tensor:
        return logits(model, tokens=40, past_key_values=DynamicCache(config=model.config))[1]

    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        found = made()
        fused = vars(model.model).pop("forward")
        assert torch.equal(made(), found)
        model.model.forward = fused


def test_padding_outputs_and_hooks_run_the_own_code(runs: list[bool]) -> None:
    model = build("Llama")
    ao_hf.fuse(model)
    ids, seen = torch.arange(1, 9).reshape(2, 4), []
    cache = AoCache(model.config, None)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        runs.clear()
        token: dict[str, Any] = {"input_ids": ids[:, :1], "past_key_values": cache}
        assert model(**token, output_hidden_states=True).hidden_states[-1].shape == (2, 1, 64)
        padded = torch.ones(2, 6, dtype=torch.int64)
        padded[0, 0] = 0
        model(**token, attention_mask=padded)
        assert runs == [False, False]
        model(**token, attention_mask=torch.ones(2, 7))
        assert runs[2:] == [True]
        handle = model.model.rotary_emb.register_forward_hook(lambda *a: seen.append(a))
        model(**token)
        assert (len(runs), len(seen)) == (3, 1)
        handle.remove()


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("Llama", {"rope_parameters": LONG}, "without a mask, or with rotary tables"),
        ("Granite", {"embedding_multiplier": 0.5}, "does not read an embedding"),
    ],
)
def test_decoders_that_do_more_keep_their_own_code(kind: str, changes: Any, reason: str) -> None:
    report = ao_hf.fuse(build(kind, **changes))
    assert isinstance(report.around, Kept)
    assert reason in report.around.reason
    assert reason in str(report)
