"""`ao_hf.fuse`: what is fused, that nothing changes, and when the modules' own code runs."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fused_models import INT4, build, logits
from torch import Tensor, nn

import ao_hf
from ao_core import QTensor, kernels, quantize_
from ao_hf.fusing.block import FusedBlock, FusedMlp

BLOCK = (
    "norm + q, k and v + rotary embedding",
    "output projection + residual + norm + gate, up and down + residual",
)
TAIL = ("residual + norm + gate, up and down + residual",)
MLP = ("gate, up and down",)


def forwards(model: nn.Module) -> list[str]:
    """Names of the modules that run in a fused form."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(vars(module).get("forward"), (FusedBlock, FusedMlp))
    ]


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """16-bit results agree bit for bit: only the order of the sums of norms differs."""
    bound = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert (found - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "changes", "ops"),
    [
        ("Llama", {}, BLOCK),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, BLOCK),
        ("Qwen2", {}, BLOCK),
        ("Gemma", {"head_dim": 16}, BLOCK),
        ("Qwen3", {"head_dim": 16}, TAIL),
        ("Olmo2", {}, MLP),
        ("Granite", {"residual_multiplier": 0.5}, MLP),
    ],
    ids=["Llama", "biases", "Qwen2", "Gemma", "Qwen3", "Olmo2", "Granite"],
)
def test_fused_models_generate_what_they_did(
    kind: str, changes: Any, ops: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Over the same cache; what another one changes is in test_default_cache.py."""
    model = build(kind, dtype, **changes)
    expected = logits(model, batch=2)
    report = ao_hf.fuse(model)
    assert [one.ops for one in report.fused] == [ops, ops]
    assert len(forwards(model)) == 2
    found = logits(model, batch=2, cache_implementation="dynamic")
    near(found[1], expected[1], dtype)
    assert torch.equal(found[0], expected[0])
    report.unfuse()
    assert forwards(model) == []
    assert torch.equal(logits(model, batch=2)[1], expected[1])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("GPT2", "c_fc is a Conv1D, no plain nn.Linear"),
        ("Phi3", "the MLP has not three linear layers, two of which read the same"),
        ("Mixtral", "no plain nn.Linear"),
    ],
)
def test_models_of_other_parts_stay_as_they_are(kind: str, reason: str) -> None:
    model = build(kind)
    expected = logits(model)[1]
    report = ao_hf.fuse(model)
    assert (report.fused, forwards(model)) == ((), [])
    assert all(reason in one.reason for one in report.kept)
    assert "not fused" in str(report)
    assert torch.equal(logits(model)[1], expected)


def test_dense_models_are_not_fused_and_can_be_quantized_after() -> None:
    model = build("Llama", recipe=None)
    report = ao_hf.fuse(model)
    assert report.fused == ()
    assert "the weight of gate_proj is not quantized" in str(report)
    quantize_(model, INT4)
    assert len(ao_hf.fuse(model).fused) == 2


@pytest.mark.parametrize(
    "recipe", ["int8_weight_only", "int8_dynamic_activation_int8_weight", "nf4_weight_only"]
)
def test_other_formats(recipe: str) -> None:
    model = build("Llama", recipe=recipe)
    expected = logits(model, batch=2)[1]
    report = ao_hf.fuse(model)
    assert len(report.fused) + len(report.kept) >= 2
    found = logits(model, batch=2)[1]
    bound = 2e-2 if "dynamic" in recipe else 1e-5  # activations may round the other way
    assert (found - expected).norm() <= bound * expected.norm()


def test_weights_share_memory_and_stay_the_same_parameters() -> None:
    model = build("Llama", attention_bias=True)
    before = {
        name: (p, p.dequantize() if isinstance(p, QTensor) else p.clone())
        for name, p in model.named_parameters()
    }
    keys = list(model.state_dict())
    ao_hf.fuse(model)
    assert list(model.state_dict()) == keys
    for name, p in model.named_parameters():
        parameter, values = before[name]
        assert p is parameter
        assert torch.equal(_values(p), values)
    joint = model.model.layers[0].forward._head.inputs.projection.weight
    assert _places([joint]) <= _places(model.parameters())


def _values(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QTensor) else tensor.detach()


def _places(tensors: Any) -> set[int]:
    """Where the memory of tensors begins."""
    leaves = [
        leaf for t in tensors for _, leaf in (t.leaves() if isinstance(t, QTensor) else [("", t)])
    ]
    return {leaf.untyped_storage().data_ptr() for leaf in leaves}


def test_saved_models_are_those_of_before(tmp_path: Path) -> None:
    model = build("Llama")
    expected = logits(model)[1]
    with ao_hf.fuse(model):
        model.save_pretrained(tmp_path)
        assert forwards(model)
    assert not forwards(model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded)[1], expected)
    assert ao_hf.fuse(loaded).fused
    near(logits(loaded)[1], expected, torch.float32)


def test_copies_and_pickles_are_not_fused() -> None:
    model = build("Llama")
    expected = logits(model)[1]
    ao_hf.fuse(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert forwards(other) == []
        assert torch.equal(logits(other)[1], expected)
        assert len(ao_hf.fuse(other).fused) == 2


def test_norms_in_another_dtype_are_left_alone() -> None:
    model = build("Llama", torch.bfloat16)
    for layer in model.model.layers:
        layer.post_attention_layernorm.float()
    report = ao_hf.fuse(model)
    assert not any(one.ops == BLOCK for one in report.fused)
    assert report.kept


def test_twice_is_as_good_as_once() -> None:
    model = build("Llama")
    first, second = ao_hf.fuse(model), ao_hf.fuse(model)
    assert first.fused == second.fused
    assert len(forwards(model)) == 2


def test_gradients_are_those_of_the_modules() -> None:
    model = build("Llama")
    ids = torch.arange(1, 9)[None]

    def gradient() -> Tensor:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return model.model.layers[0].input_layernorm.weight.grad.clone()

    expected = gradient()
    ao_hf.fuse(model)
    assert torch.equal(gradient(), expected)
    model.train()
    with torch.no_grad():
        model(ids)
    assert len(forwards(model)) == 2


def test_the_own_code_runs_for_outputs_and_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    ids = torch.arange(1, 9)[None]
    ao_hf.fuse(model)
    runs: list[int] = []
    own = FusedBlock.run
    monkeypatch.setattr(FusedBlock, "run", lambda self, x, **k: runs.append(1) or own(self, x, **k))
    with torch.no_grad():
        expected = model(ids).logits
        assert len(runs) == 2
        assert len(model(ids, output_hidden_states=True).hidden_states) == 3
        assert len(runs) == 2
        model.set_attn_implementation("eager")
        assert len(model(ids, output_attentions=True).attentions) == 2
        assert len(runs) == 2
        model.set_attn_implementation("sdpa")
        # transformers leaves its hooks where they are
        assert model.model.layers[0].self_attn._forward_hooks
        assert torch.equal(model(ids).logits, expected)
        assert len(runs) == 4
        seen: list[Any] = []
        handle = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *a: seen.append(a))
        model(ids)
        assert (len(seen), len(runs)) == (1, 5)
        handle.remove()
        model(ids)
    assert (len(seen), len(runs)) == (1, 7)


def test_pinned_bands_and_autocast() -> None:
    model = build("Llama")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        with kernels("reference"):
            expected = model(ids).logits
        ao_hf.fuse(model)
        with kernels("reference"):
            assert torch.equal(model(ids).logits, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(ids).logits.isfinite().all()


def test_weights_that_were_replaced_are_noticed() -> None:
    model = build("Llama")
    ao_hf.fuse(model)
    expected = logits(model)[1]
    up = model.model.layers[1].mlp.up_proj
    up.weight = nn.Parameter(copy.deepcopy(up.weight), requires_grad=False)
    with pytest.warns(UserWarning, match="moved or replaced since"):
        near(logits(model)[1], expected, torch.float32)
    assert forwards(model) == ["model.layers.0"]
    assert len(ao_hf.fuse(model).fused) == 2


def test_another_dtype_of_activations_stays_fused() -> None:
    model = build("Llama")
    ao_hf.fuse(model)
    model.to(torch.bfloat16)
    found = logits(model)[1]
    assert len(forwards(model)) == 2
    ao_hf.unfuse(model)
    near(found, logits(model)[1], torch.bfloat16)


class Adapted(nn.Module):
    """A linear layer with something beside it, as adapters have."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora = nn.Linear(base.in_features, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora(x)


def test_adapters_run_in_the_modules_own_code() -> None:
    model = build("Llama")
    plain = copy.deepcopy(model)
    ao_hf.fuse(model)
    for layer, other in zip(model.model.layers, plain.model.layers, strict=True):
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        other.self_attn.q_proj = copy.deepcopy(layer.self_attn.q_proj)
    expected = logits(plain)[1]
    assert torch.equal(logits(model)[1], expected)
    report = ao_hf.fuse(model)
    assert [one.ops for one in report.fused] == [TAIL, TAIL]
    assert "q_proj is a Adapted, no plain nn.Linear" in str(report)
    near(logits(model)[1], expected, torch.float32)


def test_one_step_compiles_without_breaks_and_is_not_compiled_again() -> None:
    model = build("Llama")
    ao_hf.fuse(model)

    def decode(step: Any) -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        found = []
        with torch.no_grad():
            token = model(torch.arange(1, 6)[None], past_key_values=cache).logits[:, -1:].argmax(-1)
            for place in range(5, 8):
                out = step(
                    token, past_key_values=cache, position_ids=torch.tensor([[place]])
                ).logits
                token = out.argmax(-1)
                found.append(out)
        return torch.cat(found)

    expected = decode(model)
    step = torch.compile(model.forward, fullgraph=True)
    near(decode(step), expected, torch.float32)
    with torch._dynamo.config.patch(error_on_recompile=True):
        near(decode(step), expected, torch.float32)


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str
)
def test_ways_to_generate(options: dict[str, Any]) -> None:
    model = build("Llama", torch.bfloat16)
    expected = model.generate(
        torch.arange(1, 7)[None], max_new_tokens=5, do_sample=False, **options
    )
    ao_hf.fuse(model)
    found = model.generate(torch.arange(1, 7)[None], max_new_tokens=5, do_sample=False, **options)
    assert torch.equal(found, expected)


def test_the_report_is_a_table() -> None:
    model = build("Qwen3", head_dim=16)
    lines = str(ao_hf.fuse(model)).splitlines()
    assert lines[0].startswith("model.layers.* (2) ")
    assert lines[1].endswith("not fused: q_norm is a Qwen3RMSNorm, no plain nn.Linear")


def test_a_model_that_takes_no_tokens_is_left_alone() -> None:
    model = transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
    )
    report = ao_hf.fuse(model)
    assert report.fused == ()
    assert "does not run on tokens alone" in str(report)
