"""One op from a token to its logits, over an `AoCache`: when it replaces the model's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import INT4, build, logits, served_calls
from torch import Tensor

import ao_hf
from ao_core import FqnToConfig
from ao_hf import AoCache
from ao_hf.fusing.logits import FusedModel
from ao_hf.fusing.report import Fused, FuseReport, Kept

Token = Callable[..., Any]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a fused model, whether one op made the logits; not for those that try caches."""
    found, fuse = served_calls(monkeypatch, FusedModel), ao_hf.fuse

    def counted(model: Any) -> FuseReport:
        report = fuse(model)
        found.clear()
        return report

    monkeypatch.setattr(ao_hf, "fuse", counted)
    return found


def fused(kind: str = "Llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = build(kind, dtype, **changes)
    assert ao_hf.fuse(model).logits == Fused("", FusedModel.ops)
    model.set_attn_implementation("ao_kv")
    return model


def prompted(model: Any, rows: int = 2) -> tuple[AoCache, dict[str, Any]]:
    """A cache with a prompt, and the arguments of the next token."""
    cache = AoCache(model.config, "kv8")
    with torch.no_grad():
        model(torch.arange(1, 4 * rows + 1).reshape(rows, 4), past_key_values=cache)
    return cache, {"input_ids": torch.arange(5, 5 + rows)[:, None], "past_key_values": cache}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [None, 300])
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("Llama", INT4), ("Qwen2", FqnToConfig({"lm_head": INT4, "*": INT4})), ("Gemma", INT4)],
    ids=["Llama", "Qwen2", "Gemma"],
)
def test_logits_are_those_of_the_head(
    kind: str, recipe: Any, size: int | None, dtype: torch.dtype, runs: list[bool]
) -> None:
    """Through a token that completes a block of the cache, which blocks get one by one."""
    model = fused(kind, dtype, recipe=recipe, max_position_embeddings=512)

    def generated() -> tuple[Tensor, Tensor]:
        cache = AoCache(model.config, "kv8", max_cache_len=size, largest_error=100.0)
        return logits(model, batch=2, tokens=258, past_key_values=cache)

    found = generated()
    assert (runs[0], runs.count(False)) == (False, 2)  # the prompt, and that token
    del model.forward
    sequences, expected = generated()
    assert torch.equal(found[0], sequences)
    assert (found[1] - expected).norm() < 1e-5 * expected.norm() if dtype == torch.float32 else True
    assert (found[1] == expected).float().mean() > 0.9 or dtype == torch.float32


def test_what_else_is_asked_runs_the_own_code(runs: list[bool]) -> None:
    model = fused()
    _, token = prompted(model)
    seen: list[Any] = []
    with torch.no_grad():
        runs.clear()
        assert model(**token, output_hidden_states=True).hidden_states[-1].shape == (2, 1, 64)
        assert len(model(**token, return_dict=False)) == 2
        model(**token, logits_to_keep=torch.tensor([0]))
        assert model(**token, labels=token["input_ids"]).loss is not None
        assert runs == [False] * 4
        found = model(**token, attention_mask=torch.ones(2, 9), logits_to_keep=1).logits
        assert found.shape == (2, 1, 100)
        assert runs[4:] == [True]
        for module in (model.lm_head, model.model.norm, model.model, model.model.layers[1]):
            handle = module.register_forward_hook(lambda *a: seen.append(a))
            model(**token)
            handle.remove()
        assert len(seen) == 4
        model(**token)
    # hooks on what is not called any more are seen before the op is asked for
    assert runs[5:] == [False, True]
    assert model(**token).logits.requires_grad
    assert runs[7:] == []


def test_a_mask_with_padding_is_the_own_codes(runs: list[bool]) -> None:
    model = fused()
    ids, mask = torch.arange(1, 9).reshape(2, 4), torch.ones(2, 5, dtype=torch.int64)
    mask[0, 0] = 0
    made = []
    for forward in (None, vars(model).pop("forward")):
        cache = AoCache(model.config, "kv8")
        with torch.no_grad():
            model(ids, attention_mask=mask[:, :4], past_key_values=cache)
            if forward is not None:
                model.forward = forward
            made.append(model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits)
    assert torch.equal(*made)
    assert runs == [False]


def test_the_cache_is_as_after_the_own_code(runs: list[bool]) -> None:
    """Counts, bytes of the tail, and what comes after: a crop, a prompt, a token by the own code."""
    model = fused(dtype=torch.bfloat16)
    forward = vars(model)["forward"]

    def step(by_op: bool) -> tuple[AoCache, Tensor]:
        cache, token = prompted(model)
        vars(model).pop("forward", None)
        if by_op:
            model.forward = forward
        with torch.no_grad():
            made = [model(**token).logits, model(**token).logits]
            cache.crop(-1)
            made += [model(**token).logits]
            made += [
                model(torch.ones(2, 3, dtype=torch.int64), past_key_values=cache).logits[:, -1:]
            ]
            made += [model(**token).logits]
        return cache, torch.cat(made)

    (ours, found), (own, expected) = step(True), step(False)
    assert runs.count(True) == 4
    assert str(ours) == str(own)
    for a, b in zip(ours.layers, own.layers, strict=True):
        assert a.tokens == b.tokens
        assert all(map(torch.equal, a.kv.tensors(), b.kv.tensors()))
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("Granite", {}, None),
        ("Gemma2", {}, None),
        ("Llama", {"recipe": FqnToConfig({"lm_head": None, "*": INT4})}, "is not quantized"),
        ("Cohere", {}, None),
    ],
)  # fmt: skip
def test_other_heads_keep_their_own_code(kind: str, changes: Any, reason: str | None) -> None:
    model = build(kind, **changes)
    report = ao_hf.fuse(model)
    assert "forward" not in vars(model)
    if reason is not None:
        assert isinstance(report.logits, Kept)
        assert reason in report.logits.reason
        assert reason in str(report)


def test_a_replaced_head_is_noticed_and_unfuse_leaves_nothing(runs: list[bool]) -> None:
    model = fused()
    _, token = prompted(model)
    before = model.lm_head.weight
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(before.dequantize(), requires_grad=False)
        runs.clear()
        with pytest.warns(UserWarning, match=r"call ao_hf.fuse\(model\) again"):
            model(**token)
        assert runs == []
    assert "forward" not in vars(model)
    model.lm_head.weight = before
    report = ao_hf.fuse(model)
    assert "forward" in vars(model)
    report.unfuse()
    assert "forward" not in vars(model)
