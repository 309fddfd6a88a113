"""`evaluate`, and `ao eval`: figures are those of an independent computation, in whatever chunks."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
import torch

from ao_core.ext import ConfigError, MissingExtraError, UnknownNameError
from ao_hf.generation import (
    Variant,
    default_text,
    evaluate,
    generate,
    load,
    score_tasks,
    windows_of,
)

TEXT = default_text()


@pytest.fixture
def windows(loaded):
    return windows_of(loaded.tokenizer, TEXT, 200, 100)


def log_probabilities(loaded, window):
    """In float64, by one pass without a cache."""
    logits = loaded.model(window[None], use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_original_beside_itself(loaded, windows, chunk):
    (found,) = evaluate(
        loaded, [Variant("same", lambda: loaded)], windows, chunks=[chunk], greedy_tokens=5
    )
    losses = [-log_probabilities(loaded, w).gather(1, w[1:, None]).mean() for w in windows]
    assert found.perplexity == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-5)
    assert abs(found.kl_nats) < 1e-5
    assert (found.agreement, found.diverges_after, found.greedy_tokens) == (1.0, 5, 5)
    assert (found.tokens, found.chunk, found.kv) == (198, chunk, None)


def test_a_variant_beside_the_original(folder, loaded, windows):
    other = load(folder, "int4_weight_only", device="cpu")
    (found,) = evaluate(
        loaded, [Variant("int4", lambda: other)], windows, chunks=[9], greedy_tokens=8
    )
    kls, same = [], []
    for window in windows:
        p, q = log_probabilities(loaded, window), log_probabilities(other, window)
        kls.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    kl = torch.cat(kls)
    assert found.kl_nats == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found.kl_error == pytest.approx(float(kl.std() / len(kl) ** 0.5), rel=0.02)
    assert found.agreement == pytest.approx(float(torch.cat(same).double().mean()), abs=0.011)
    assert 0.01 < found.kl_nats < 2


def test_divergence_is_that_of_free_continuations(folder, loaded):
    other = load(folder, "int4_weight_only", device="cpu")
    windows = windows_of(loaded.tokenizer, TEXT, 60, 60)
    (found,) = evaluate(
        loaded, [Variant("int4", lambda: other)], windows, chunks=[1], greedy_tokens=30
    )
    prompt = loaded.tokenizer.decode(windows[0])
    texts = [generate(x, prompt, chat=False, max_new_tokens=30).tokens for x in
             (loaded, type(other)(other.model, loaded.tokenizer, folder))]  # fmt: skip
    differing = [a != b for a, b in zip(*texts, strict=True)]
    assert found.diverges_after == (differing.index(True) if any(differing) else 30)


def test_the_cache_is_the_one_that_is_named(loaded):
    """Blocks that are quantized change what is predicted, and the fewer their bits, the more."""
    windows = windows_of(loaded.tokenizer, TEXT, 400, 400)
    variants = [Variant("same", lambda: loaded, kv) for kv in (None, "kv8", "kv4")]
    exact, kv8, kv4 = evaluate(loaded, variants, windows, chunks=[64], greedy_tokens=1)
    assert exact.kl_nats < 1e-5 < kv8.kl_nats < kv4.kl_nats
    assert kv4.kl_nats < 1


def test_models_are_loaded_once_and_progress_is_shown(folder, loaded, windows):
    loads, shown = [], []

    def get(recipe):
        loads.append(recipe)
        return load(folder, recipe, device="cpu")

    variants = [Variant(r, partial(get, r), kv) for r in ("int8_weight_only", "int4_weight_only")
                for kv in (None, "kv8")]  # fmt: skip
    rows = evaluate(
        loaded, variants, windows, chunks=[50, 100], greedy_tokens=1,
        progress=lambda done, total, name: shown.append((done, total, name)),
    )  # fmt: skip
    assert loads == ["int8_weight_only", "int4_weight_only"]
    assert [(r.name, r.kv, r.chunk) for r in rows] == [
        (v.name, v.kv, c) for v in variants for c in (50, 100)
    ]
    assert shown[1] == (1, 8, "int8_weight_only with kv8, window 1")
    assert shown[-1] == (8, 8, "")


def test_windows_are_spread_over_the_text(loaded):
    ids = torch.tensor(loaded.tokenizer(TEXT[:1000])["input_ids"])
    windows = windows_of(loaded.tokenizer, TEXT[:1000], 300, 100)
    assert windows.shape == (3, 100)
    assert torch.equal(windows[0], ids[:100])
    assert torch.equal(windows[2], ids[-100:])
    assert windows_of(loaded.tokenizer, TEXT, 10, 512).shape == (1, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": [0]}, "chunks=\\(0,\\): use numbers"),
        ({"chunks": []}, "chunks=\\(\\): use numbers"),
        ({"greedy_tokens": 0}, "greedy_tokens=0"),
    ],
)
def test_numbers_that_cannot_work(loaded, windows, options, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(loaded, [Variant("same", lambda: loaded)], windows, **options)


def test_text_that_is_too_short(loaded):
    with pytest.raises(ConfigError, match="text: has 5 tokens, and a window has 100"):
        windows_of(loaded.tokenizer, "short", 300, 100)
    with pytest.raises(ConfigError, match="tokens=1, window=512"):
        windows_of(loaded.tokenizer, TEXT, 1)


def test_no_cache_of_that_name(loaded, windows):
    with pytest.raises(UnknownNameError, match="Did you mean 'kv8'"):
        evaluate(loaded, [Variant("same", lambda: loaded, "kv88")], windows)


def test_tasks_need_lm_eval(loaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtraError, match="lm-eval"):
        score_tasks(loaded, ["hellaswag"])


SMALL = ("--tokens", "80", "--window", "40", "--device", "cpu")


def test_the_command(ao, folder, tmp_path):
    out, text = tmp_path / "out.json", tmp_path / "text.txt"
    text.write_text(TEXT[:400], encoding="utf-8")
    result = ao(
        "eval", folder, *SMALL, "--recipe", "int8_weight_only", "--kv", "kv8", "--chunks", "1,16",
        "--text", text, "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1].split() == ["model", "cache", "chunk", "perplexity", "KL,", "nats", "same", "token",
                                "diverges", "after"]  # fmt: skip
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [(r["name"], r["kv"], r["chunk"]) for r in found["rows"]] == [
        (name, kv, chunk)
        for name in ("float32", "int8_weight_only")
        for kv in (None, "kv8")
        for chunk in (1, 16)
    ]
    assert all(r["tokens"] == 78 and r["kl_nats"] < 0.1 for r in found["rows"])
    assert found["about"]["versions"]["torch"] == torch.__version__
    assert found["text"] == str(text)


def test_the_command_on_a_quantized_folder(ao, folder, tmp_path):
    loaded = load(folder, "int4_weight_only", device="cpu")
    loaded.model.save_pretrained(tmp_path / "small")
    loaded.tokenizer.save_pretrained(tmp_path / "small")
    result = ao("eval", tmp_path / "small", "--original", folder, *SMALL, "--chunks", "16")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[3:5]] == ["float32", "small"]
    alone = ao("eval", tmp_path / "small", *SMALL)
    assert (alone.exit_code, "by --original" in alone.stderr) == (2, True)
    again = ao("eval", tmp_path / "small", "--recipe", "int8_weight_only", *SMALL)
    assert "quantized by ao already" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "int4_weight_onyl"), "Did you mean 'int4_weight_only'"),
        (("--kv", "kv88"), "Did you mean 'kv8'"),
        (("--chunks", "1,x"), "--chunks 1,x: give positive numbers"),
        (("--text", "absent.txt"), "--text absent.txt: cannot be read"),
        (("--json", "absent/out.json"), "--json absent/out.json: there is no directory absent"),
    ],
)
def test_bad_input_is_one_line(ao, folder, arguments, message):
    result = ao("eval", folder, *SMALL, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
