"""Decoding by programs: what is recorded, when a program runs, and what is kept on disk."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import ao_hf
from ao_core.ext import ConfigError, UnsupportedOp
from ao_hf.generation import generate, load, programs, steps
from ao_hf.generation.caches import decoding, fixed_cache, make_cache
from ao_hf.generation.recording import constants_of, record

PROMPT = "The quick brown fox"


@pytest.fixture
def interpreted(monkeypatch):
    """Programs that run op by op, without a compiler; the list has their digests."""
    made = []

    def program_of(module, inputs):
        made.append(programs.digest_of(module, inputs))
        return lambda tensors: module(*tensors)

    monkeypatch.setattr(steps, "program_of", program_of)
    return made


@pytest.mark.parametrize(("kv", "fused"), [(None, True), ("kv8", True), ("kv4", False)])
def test_programs_write_what_the_model_writes(folder, interpreted, kv, fused):
    loaded = load(folder, "int8_weight_only", device="cpu")
    if fused:
        ao_hf.fuse(loaded.model)
    # over the end of the first block of 128 tokens, which is quantized without a program
    expected = generate(loaded, PROMPT, max_new_tokens=260, kv=kv)
    found = generate(loaded, PROMPT, max_new_tokens=260, kv=kv, compiled=True)
    assert found.tokens == expected.tokens
    assert len(interpreted) == 1
    generate(loaded, PROMPT, max_new_tokens=3, kv=kv, compiled=True)
    assert interpreted[0] == interpreted[1]  # the same ops are recorded
    assert "forward" not in vars(loaded.model)


def test_when_programs_run(loaded, interpreted):
    model = loaded.model
    cache, stepping = fixed_cache(model, "kv8", 100)
    ids = torch.arange(5)[None]
    with torch.no_grad(), decoding(model, "kv8"), stepping as found:
        for tokens, options, count in (
            (ids, {}, 0),  # a prompt
            (ids[:, :1], {}, 0),  # which is recorded
            (ids[:, :1], {}, 1),
            (ids[:, :1], {"output_hidden_states": True}, 1),
            (ids[:, :1], {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1]])}, 1),
            (ids[:, :1], {"attention_mask": torch.ones(1, 10)}, 2),
            (ids[:, :2], {}, 2),
        ):
            model(input_ids=tokens, past_key_values=cache, **options)
            assert found.count == count
        model(input_ids=ids, past_key_values=make_cache(model, None))
        assert found.count == 2


def test_no_programs_for_a_cache_that_grows(loaded):
    with (
        pytest.raises(
            ConfigError, match="AoCache whose layers all see the whole text, and max_cache_len"
        ),
        steps.stepping(loaded.model, make_cache(loaded.model, "kv8")),
    ):
        pass


def test_what_is_recorded():
    x, weight, seen = torch.ones(2), torch.tensor([2.0, 3.0]), torch.zeros(2)

    def function():
        seen.add_(x)
        return {"y": (x * weight + float(weight[0])).chunk(2)[1]}

    result, module = record(function, {"x": x}, lambda found: found["y"])
    assert result["y"].tolist() == [5]
    assert [c.data_ptr() for c in constants_of(module).values()] == [
        seen.data_ptr(),
        weight.data_ptr(),
    ]
    assert module(2 * x).tolist() == [8]
    assert seen.tolist() == [3, 3]
    part = seen[:1]
    with pytest.raises(UnsupportedOp, match="memory of several tensors"):
        record(lambda: part.add_(x[:1]) * seen, {"x": x}, lambda found: found)
    with pytest.raises(UnsupportedOp, match="not made by ops"):
        record(lambda: x, {}, lambda found: found)


def test_programs_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_CACHE", str(tmp_path))
    weight, small, seen, x = torch.full((20,), 2.0), torch.ones(1), torch.zeros(20), torch.ones(20)

    def function():
        seen.add_(x)
        return (x * weight + seen) * small

    _, module = record(function, {"x": x}, lambda found: found)
    assert programs.program_of(module, {"x": x})([x])[0] == 4
    (path,) = (tmp_path / "programs").glob("*.pt2")
    before = path.stat().st_mtime_ns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = programs.program_of(module, {"x": x})
    weight.zero_()  # which the program has not copied
    assert run([x])[0] == seen[0] == 3
    assert path.stat().st_mtime_ns == before
    monkeypatch.setattr(programs, "_compile", lambda module, inputs, where: good(where))

    def good(where: Path) -> None:
        where.write_bytes(data)

    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.warns(
        UserWarning, match="cannot be used .its digest is another one., and is compiled again"
    ):
        assert programs.program_of(module, {"x": x})([x])[0] == 4
    path.with_suffix(".sha256").unlink()
    with pytest.warns(UserWarning, match="No such file"):
        programs.program_of(module, {"x": x})
    assert programs.digest_of(module, {"x": x}) == path.stem
    small.zero_()  # whose value is in the program
    assert programs.digest_of(module, {"x": x}) != path.stem
    small.add_(1)
    monkeypatch.setattr(torch, "__version__", "0")
    assert programs.digest_of(module, {"x": x}) != path.stem


def test_programs_round_as_ops_do(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_CACHE", str(tmp_path))
    torch.manual_seed(0)
    x, weight = torch.randn(1, 64).bfloat16(), torch.randn(64).bfloat16()

    def function():
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return weight * y.to(x.dtype)  # a norm of Llama, which rounds twice

    expected, module = record(function, {"x": x}, lambda found: found)
    assert torch.equal(programs.program_of(module, {"x": x})([x]), expected)
