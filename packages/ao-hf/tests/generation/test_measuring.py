"""`measure` and `ao bench`: what is counted, and that contenders take turns beside the dense model."""

from __future__ import annotations

import json
import os

import pytest
import torch
import transformers

from ao_core import QTensor
from ao_core.ext import AoError, ConfigError, UnknownNameError
from ao_core.testing.warm import run_python
from ao_hf.generation import Sample, Workload, load, measure, runner_of, weights_read
from ao_hf.generation.caches import cache_bytes, cache_reads, fill, make_cache
from ao_hf.generation.machine import PeakMemory, about, read_rate
from ao_hf.generation.worker import Worker


@pytest.fixture
def in_process(monkeypatch):
    """Contenders in this process: starting one takes seconds."""
    from ao_hf.generation.worker import contender

    def runners(contenders, stack):
        return {name: contender(**options) for name, options in contenders.items()}

    monkeypatch.setattr("ao_hf.commands.contenders.started", runners)


def test_a_run(loaded):
    sample = runner_of(loaded)(Workload(20, 5, 2))
    assert sample.first > 0
    assert sample.decode > 0
    # 2 layers of keys and values, 2 rows, 2 heads of 12, float32; the last token is not in the cache
    assert sample.cache == sample.cache_memory == 2 * 2 * 2 * 24 * 2 * 12 * 4
    assert sample.weights == weights_read(loaded.model, 2)
    assert sample.resident > 1e7
    assert sample.allocated is None


def test_a_run_with_a_quantized_cache(loaded):
    sample = runner_of(loaded, "kv8")(Workload(300, 3))
    # 256 − 128 tokens in blocks, of 12 + 2 bytes for keys and for values of each head; the rest exact
    blocks, rest = 128, 302 - 128
    assert sample.cache == 2 * 2 * 2 * (blocks * (12 + 2) + rest * 12 * 4)
    assert sample.cache_memory > sample.cache
    with pytest.raises(UnknownNameError, match="Did you mean 'kv8'"):
        runner_of(loaded, "kv88")


@pytest.mark.parametrize("kv", [None, "kv8"])
def test_a_filled_cache_is_that_of_a_prompt_as_long(loaded, kv):
    given, filled = (
        runner_of(loaded, kv)(w) for w in (Workload(304, 3), Workload(4, 3, filled=300))
    )
    assert filled.cache == given.cache > 0
    run, again = runner_of(loaded, kv), Workload(4, 3, filled=300)
    assert run(again).cache == run(again).cache == given.cache
    ragged = Workload(8, 3, 2, ragged=True, filled=300)
    assert runner_of(loaded, kv)(ragged).cache == 2 * runner_of(loaded, kv)(Workload(308, 3)).cache
    assert str(ragged).startswith("batch of 2, after 300 random keys and values, prompt of 2 to 8")
    assert ragged.inputs(50)[1].sum(1).tolist() == [302, 308]


def test_filling_is_in_pieces_and_needs_keys(loaded, monkeypatch):
    monkeypatch.setattr("ao_hf.generation.caches._PIECE", 100)
    own, exact = (make_cache(loaded.model, kv) for kv in (None, "exact"))
    for cache in (own, exact):
        fill(cache, loaded.model, 2, 250)
    for ours, theirs in zip(exact.layers, own.layers, strict=True):
        assert theirs.values.shape == (2, 2, 250, 12)
        assert torch.equal(theirs.keys[:, :, :50], theirs.keys[:, :, 200:])
        assert torch.equal(ours.keys.dense(), theirs.keys)
        assert theirs.keys.std() == pytest.approx(1, abs=0.05)
    assert not torch.equal(own.layers[0].keys, own.layers[1].keys)
    assert exact.get_seq_length() == 250
    monkeypatch.setattr("ao_hf.generation.caches._PIECE", 384)
    long = make_cache(loaded.model, "kv4")
    fill(long, loaded.model, 2, 1000)  # blocks of 128 whose codes come again, and 232 exact tokens
    keys, values = long.layers[1].keys.dense(), long.layers[1].values.dense()
    assert (long.get_seq_length(), long.layers[1].kv.coded, keys.shape[2]) == (1000, 768, 1000)
    for x in (keys, values):
        assert torch.equal(x[:, :, :256], x[:, :, 256:512])
        assert torch.equal(x[:, :, :256], x[:, :, 512:768])
        assert x[:, :, 768:].std() == pytest.approx(1, abs=0.05)
    monkeypatch.setattr("ao_hf.generation.caches._one_token", lambda model: [None, None])
    with pytest.raises(ConfigError, match="filled=9: layer 0 of LlamaForCausalLM keeps no keys"):
        fill(own, loaded.model, 1, 9)


def test_a_static_cache_counts_the_tokens_that_are_there(loaded):
    cache = make_cache(loaded.model, None, 100)
    loaded.model(torch.ones(1, 10, dtype=torch.long), past_key_values=cache)
    assert cache_bytes(cache) > cache_reads(cache, 1) == 2 * 2 * 2 * 10 * 12 * 4


def test_weights_that_are_read(folder):
    loaded = load(folder, "int8_weight_only", device="cpu")
    stored = sum(
        p.stored_bytes if isinstance(p, QTensor) else p.nbytes
        for name, p in loaded.model.named_parameters() if name != "model.embed_tokens.weight"
    )  # fmt: skip
    assert weights_read(loaded.model) == stored


def test_weights_of_a_tied_head_and_of_experts():
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    tied = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
    )
    assert weights_read(tied) == sum(p.nbytes for p in tied.parameters())
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2)
    )
    experts = sum(p.nbytes for p in mixtral.parameters() if p.dim() == 3)
    others = weights_read(mixtral, 4) - experts
    assert experts > 0
    assert weights_read(mixtral, 1) == others + experts // 4
    assert weights_read(mixtral, 9) == others + experts


def test_workloads():
    assert Workload(64, 8, 3).lengths() == [64, 64, 64]
    ragged = Workload(64, 8, 3, ragged=True)
    assert ragged.lengths() == [16, 40, 64]
    ids, mask = ragged.inputs(100)
    assert ids.shape == mask.shape == (3, 64)
    assert mask.sum(1).tolist() == [16, 40, 64]
    assert bool(mask[:, -1].all())
    assert torch.equal(ids, Workload(64, 8, 3).inputs(100)[0])
    assert str(ragged) == "batch of 3, prompt of 16 to 64 tokens, 8 new"
    for bad in ((0, 8, 1), (8, 1, 1), (8, 8, 0)):
        with pytest.raises(ConfigError, match="use 1 or more"):
            Workload(*bad)
    with pytest.raises(ConfigError, match="filled=-1"):
        Workload(8, filled=-1)


def test_figures_follow_from_samples():
    """Two contenders whose runs take what is said here."""
    calls = []

    def runner(name, decode):
        def run(workload):
            calls.append((name, workload.new))
            return Sample(0.5, decode, 1000, 100, 120, 7, None)

        return run

    work = Workload(90, 10, 2)
    one, two = measure({"a": runner("a", 1.0), "b": runner("b", 0.5)}, [work], rounds=3)
    assert calls == [
        ("a", 2),
        ("b", 2),
        *[("a", 10), ("b", 10)],
        *[("b", 10), ("a", 10)],
        *[("a", 10), ("b", 10)],
    ]
    assert one.prefill_rate.median == 2 * 90 / 0.5
    assert (one.decode_rate.median, two.decode_rate.median) == (18.0, 36.0)
    assert (one.times_baseline.median, two.times_baseline.low) == (1.0, 2.0)
    assert one.bytes_per_token == (1000 + 100 * 95 / 100) / 2
    assert two.share_of_read.median == pytest.approx(2 * one.share_of_read.median)
    assert 0 < one.share_of_read.median < 1e-3
    assert (one.cache_bytes, one.peak_resident, one.peak_allocated) == (120, 7, None)


def test_nothing_to_measure():
    with pytest.raises(ConfigError, match="0 contenders"):
        measure({}, [Workload(4)])
    with pytest.raises(ConfigError, match="rounds=0"):
        measure({"a": print}, [Workload(4)], rounds=0)


def test_the_machine():
    found = about()
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]
    assert found["commit"] is None or len(found["commit"]) == 40
    assert 1e8 < read_rate() < 1e12
    peak = PeakMemory()
    before = peak.resident()
    big = torch.ones(40_000_000)
    assert peak.resident() - before > 0.8 * big.nbytes
    del big
    assert PeakMemory().resident() < before + 80_000_000


@pytest.mark.slow
def test_as_a_program_with_processes(folder, tmp_path):
    out = tmp_path / "out.json"
    env = {**os.environ, "COLUMNS": "200", "AO_PLUGINS": "hf,quant"}
    done = run_python(
        "-m", "ao_core.cli", "bench", folder, "--recipe", "int8_weight_only", "--prompt-lengths", "8",
        "--new-tokens", "4", "--rounds", "2", "--device", "cpu", "--json", out, env=env,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["contender"] for row in rows] == ["bfloat16", "int8_weight_only"]
    assert all(row["peak_resident"] > 1e7 for row in rows)


@pytest.mark.slow
def test_errors_of_a_process_are_told(folder):
    options = {
        "model": str(folder),
        "recipe": "absent",
        "kv": None,
        "device": "cpu",
        "dtype": "auto",
        "dense": False,
    }
    with pytest.raises(AoError, match="int: UnknownNameError: unknown recipe 'absent'"):
        Worker("int", options)
    with Worker("int8", options | {"recipe": "int8_weight_only"}) as worker:
        assert worker(Workload(8)).resident > 1e7
        worker._process.kill()
        with pytest.raises(AoError, match="int8: its process ended .killed"):
            worker(Workload(8))


SMALL = ("--prompt-lengths", "8,16", "--new-tokens", "3", "--rounds", "1", "--device", "cpu")


def test_the_command(ao, folder, tmp_path, in_process):
    out, text = tmp_path / "out.json", tmp_path / "out.md"
    result = ao(
        "bench", folder, *SMALL, "--recipe", "int8_weight_only", "--kv", "kv8", "--batches", "1,2",
        "--ragged", "--json", out, "--markdown", text,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    titles = [line for line in result.stdout.splitlines() if line.startswith("batch of")]
    assert len(titles) == 2 * 3
    assert "batch of 2, prompt of 2 to 8 tokens, 3 new" in titles
    found = json.loads(out.read_text(encoding="utf-8"))
    names = ["bfloat16", "bfloat16, kv8", "int8_weight_only", "int8_weight_only, kv8"]
    assert [row["contender"] for row in found["rows"]] == names * 6
    assert found["about"]["machine"]
    assert text.read_text(encoding="utf-8").count("| int8_weight_only, kv8 |") == 6


def test_a_quantized_folder_is_beside_its_dense_model(ao, folder, tmp_path, in_process):
    loaded = load(folder, "int4_weight_only", device="cpu")
    loaded.model.save_pretrained(tmp_path / "small")
    out = tmp_path / "out.json"
    result = ao("bench", tmp_path / "small", *SMALL, "--dtype", "float32", "--json", out)
    assert result.exit_code == 0, result.output
    rows = {row["contender"]: row for row in json.loads(out.read_text(encoding="utf-8"))["rows"]}
    assert list(rows) == ["bfloat16", "float32", "small"]
    assert rows["float32"]["weights_bytes"] == 2 * rows["bfloat16"]["weights_bytes"]
    assert rows["small"]["weights_bytes"] < 0.4 * rows["float32"]["weights_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "int4_weight_onyl"), "Did you mean 'int4_weight_only'"),
        (("--kv", "kv88"), "Did you mean 'kv8'"),
        (("--batches", "0"), "--batches 0: give positive numbers"),
        (("--device", "gpu0"), "device='gpu0'"),
        (("--markdown", "absent/out.md"), "there is no directory absent"),
    ],
)
def test_bad_input_is_one_line(ao, folder, arguments, message):
    result = ao("bench", folder, *SMALL, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
