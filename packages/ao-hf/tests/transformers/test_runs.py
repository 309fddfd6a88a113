"""Runs of fused blocks: one op for a few tokens over an `AoCache`, with the results of single blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import ao_hf
from ao_core import QTensor, quantize_
from ao_core.ext import ConfigError
from ao_hf import AoCache
from ao_hf.fusing.logits import FusedModel
from ao_hf.fusing.runs import Run
from ao_hf.generation.programs import program_of
from ao_hf.generation.recording import record
from ao_quant import Int4WeightOnlyConfig

SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SLIDING = {
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0,
}  # fmt: skip


def build(kind: str = "Llama", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A quantized model, fused."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.12)
    quantize_(model, Int4WeightOnlyConfig(32, symmetric=True))
    model.set_attn_implementation("ao_kv")
    return model


class Steps:
    """Counts what runs of blocks are asked for, and how often they served."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked = self.served = 0
        self.on, own = True, Run.step

        def step(run: Run, *args: Any) -> Any:
            found = own(run, *args) if self.on else None
            self.asked, self.served = self.asked + 1, self.served + (found is not None)
            return found

        patch.setattr(Run, "step", step)
        # else one op makes logits, and no block is called
        patch.setattr(FusedModel, "run", lambda *args, **kwargs: NotImplemented)

    def both(self, function: Any) -> tuple[Any, Any]:
        """What a function returns without and with runs."""
        self.on = False
        expected = function()
        self.on, self.served = True, 0
        return expected, function()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def generated(model: Any, cache: Any, rows: int = 1, tokens: int = 6, **options: Any) -> Tensor:
    """Logits of greedy tokens after a prompt, or sequences where there are several candidates."""
    ids = torch.arange(1, 9 * rows + 1).reshape(rows, 9)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, :3] = 0
    found = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    if "num_beams" in options or "assistant_model" in options:
        return found.sequences  # type: ignore[no-any-return]
    return torch.stack(found.logits)


def stored(cache: AoCache) -> list[Tensor]:
    return [x for layer in cache.layers if hasattr(layer, "kv") for x in layer.kv.tensors()]


@pytest.mark.parametrize(
    ("kind", "changes", "kv", "size", "blocks"),
    [
        ("Llama", {}, "kv8", None, 4),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, "kv4", 300, 4),
        ("Qwen2", SLIDING, "k8v4", None, 3),
        ("Gemma", {}, "kv_fp8", None, 4),
    ],
    ids=["Llama", "biases", "sliding", "Gemma"],
)
def test_bits_are_those_of_the_blocks_one_by_one(
    steps: Steps, kind: str, changes: Any, kv: str, size: int | None, blocks: int
) -> None:
    """Through a token that completes a block of the cache, which runs leave to `append_`."""
    model = build(kind, **changes)
    report = ao_hf.fuse(model)
    assert sum(count for _, count in report.runs) == 4
    assert "one op for a few tokens" in str(report)
    caches: list[AoCache] = []

    def run() -> Tensor:
        caches.append(AoCache(model.config, kv, max_cache_len=size, largest_error=100.0))
        ids = torch.arange(250)[None] % 90
        with torch.no_grad():
            out = [model(ids, past_key_values=caches[-1]).logits[:, -1:]]
            out += [model(ids[:, i : i + 1], past_key_values=caches[-1]).logits for i in range(9)]
            out.append(model(ids[:, 9:14], past_key_values=caches[-1]).logits)
        return torch.cat(out, 1)

    expected, found = steps.both(run)
    assert torch.equal(found, expected)
    assert steps.served == 9 * blocks  # 10 steps, one of which quantizes
    assert all(map(torch.equal, stored(caches[1]), stored(caches[0])))
    assert caches[1].ahead is None


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 2},
        {"num_beams": 3},
        {"num_beams": 2, "rows": 2},
        {"assistant": True},
        {"output_hidden_states": True},
    ],
    ids=str,
)
def test_ways_to_generate(steps: Steps, options: dict[str, Any]) -> None:
    model = build()
    ao_hf.fuse(model)
    listens = "output_hidden_states" in options
    if "assistant" in options:
        options = {"assistant_model": build(num_hidden_layers=1)}

    def run() -> Tensor:
        return generated(model, AoCache(model.config, "kv8"), **options)

    expected, found = steps.both(run)
    assert torch.equal(found, expected)
    assert (steps.served > 0) != listens


def decoded(model: Any, cache: AoCache, tokens: int = 3, **options: Any) -> Any:
    """The outputs of some steps."""
    outs = []
    with torch.no_grad():
        model(torch.arange(1, 70)[None], past_key_values=cache)
        for token in range(tokens):
            outs.append(model(torch.tensor([[token + 4]]), past_key_values=cache, **options))
    return outs


@pytest.mark.parametrize("inference", [False, True])
def test_hooks_are_honoured(steps: Steps, inference: bool) -> None:
    """On blocks, where they may write to what blocks return; on modules in blocks; on all modules."""
    model = build()
    ao_hf.fuse(model)
    layers = model.model.layers

    def run() -> Tensor:
        with torch.inference_mode(inference):
            return torch.cat([x.logits for x in decoded(model, AoCache(model.config, "kv8"))])

    plain, found = steps.both(run)
    assert torch.equal(found, plain)
    assert steps.served == 12
    for register, hook in (
        (layers[1].register_forward_hook, lambda module, args, out: out.mul_(1.5)),
        (layers[2].register_forward_pre_hook, lambda module, args: (args[0] * 1.5,)),
        (layers[3].mlp.up_proj.register_forward_hook, lambda module, args, out: out * 1.5),
        (torch.nn.modules.module.register_module_forward_hook, lambda *args: None),
    ):
        handle = register(hook)
        try:
            expected, found = steps.both(run)
        finally:
            handle.remove()
        assert torch.equal(found, expected)
        assert steps.served == 0
    assert torch.equal(run(), plain)
    assert steps.served == 12


def test_what_a_model_does_between_blocks_counts(steps: Steps) -> None:
    """Blocks that are called with something else, or with what was written to, run themselves."""
    model = build()
    ao_hf.fuse(model)

    def run(change: Any) -> Any:
        cache = AoCache(model.config, "kv8")
        decoded(model, cache, 1)
        x = torch.ones(1, 1, 64).bfloat16()
        tables, outs = model.model.rotary_emb(x, torch.tensor([[70]])), []
        with torch.no_grad():
            for layer in model.model.layers:
                x = change(layer(x, position_embeddings=tables, past_key_values=cache))
                outs.append(x.clone())
        assert cache.ahead is None
        return *outs, *stored(cache)

    for change in (lambda x: x + 1, lambda x: x.add_(1)):
        expected, found = steps.both(lambda change=change: run(change))
        assert all(map(torch.equal, found, expected))
        assert steps.served == 4 + 1


def test_a_model_that_stops_early_leaves_no_tokens_in_other_layers(steps: Steps) -> None:
    model = build()
    ao_hf.fuse(model)

    def run() -> Any:
        cache = AoCache(model.config, "kv8")
        outs = decoded(model, cache, 1)
        model.model.config.num_hidden_layers = 2
        try:
            ids = torch.tensor([[7]])
            with torch.no_grad():
                outs.append(model(ids, past_key_values=cache))
        finally:
            model.model.config.num_hidden_layers = 4
        return [out.logits[:, -1] for out in outs], cache.report()

    (expected, before), (found, after) = steps.both(run)
    assert all(map(torch.equal, found, expected))
    assert after == before
    assert steps.served == 4 + 2


def test_blocks_that_are_called_otherwise_run_themselves(steps: Steps) -> None:
    """One block alone, another order, other arguments; then the cache is cropped."""
    model = build()
    ao_hf.fuse(model)
    layers = model.model.layers

    def run() -> Any:
        cache = AoCache(model.config, "kv8")
        decoded(model, cache, 1)
        x = torch.ones(1, 1, 64).bfloat16()
        tables = model.model.rotary_emb(x, torch.tensor([[70]]))
        other = model.model.rotary_emb(x, torch.tensor([[71]]))
        with torch.no_grad():
            first = layers[0](x, position_embeddings=tables, past_key_values=cache)
            second = layers[1](first, position_embeddings=other, past_key_values=cache)
            last = layers[3](second, position_embeddings=tables, past_key_values=cache)
        tokens = [layer.tokens for layer in cache.layers]
        return first, second, last, torch.tensor(tokens), *stored(cache)[:1]

    expected, found = steps.both(run)
    assert all(map(torch.equal, found, expected))
    assert found[3].tolist() == [71, 71, 70, 71]
    assert steps.served == 4 + 1


def test_replaced_weights_and_unfused_blocks_are_noticed(steps: Steps) -> None:
    model = build()
    ao_hf.fuse(model)
    down = model.model.layers[1].mlp.down_proj
    assert isinstance(down.weight, QTensor)
    down.weight = torch.nn.Parameter(copy.deepcopy(down.weight), requires_grad=False)
    steps.served = 0  # those by which caches were tried
    with pytest.warns(UserWarning, match="moved or replaced since"):
        generated(model, AoCache(model.config, "kv8"))
    assert steps.served == 0
    ao_hf.fuse(model)
    ao_hf.unfuse(model.model.layers[3])
    expected, found = steps.both(lambda: generated(model, AoCache(model.config, "kv8")))
    assert torch.equal(found, expected)
    assert steps.served == 0


def test_a_full_static_cache_says_so() -> None:
    model = build()
    ao_hf.fuse(model)
    cache = AoCache(model.config, "kv8", max_cache_len=70)
    with pytest.raises(ConfigError, match="memory for 70"):
        decoded(model, cache, 3)


def test_programs_hold_one_op_for_all_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A recorded step, compiled by AOTInductor, gives the same bits and writes the same caches."""
    monkeypatch.setenv("AO_CACHE", str(tmp_path))
    model = build(num_hidden_layers=2)
    ao_hf.fuse(model)
    caches = [AoCache(model.config, "kv8", max_cache_len=100) for _ in range(2)]
    for cache in caches:
        decoded(model, cache, 1)
    inputs = {"ids": torch.tensor([[5]]), "position": torch.tensor([[70]])}

    def step(cache: AoCache) -> Any:
        with torch.no_grad():
            return model(
                input_ids=inputs["ids"], position_ids=inputs["position"], past_key_values=cache
            )

    out, module = record(lambda: step(caches[0]), inputs, lambda result: result.logits)
    ops = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert ops.count("ao_kernels.decoder.default") == 1
    program = program_of(module, inputs)
    assert torch.equal(step(caches[1]).logits, out.logits)
    inputs = {"ids": torch.tensor([[9]]), "position": torch.tensor([[71]])}
    found, expected = program(list(inputs.values())), step(caches[1]).logits
    # tables of the rotary embedding are computed by other instructions
    assert (found - expected).norm() <= 1e-2 * expected.norm()
    assert caches[0].layers[1].kv.counts.tolist() == [72, 0]
    for one, other in zip(stored(caches[0]), stored(caches[1]), strict=True):
        assert (one.double() - other.double()).norm() <= 1e-2 * other.double().norm()
