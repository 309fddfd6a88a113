"""What generation does to a cache, how large it is, compiled code, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ao_core import WHOLE, Spec
from ao_core.ext import ConfigError, UnknownNameError
from ao_quant.kv_cache import (
    KV_RECIPES,
    KVCacheConfig,
    append,
    append_,
    attend_to,
    bytes_per_token,
    crop_,
    dequantized,
    exact_like,
    grown,
    kv_config,
    new_kv,
    reorder_,
    repeat,
    select,
    widened,
)

INT8 = Spec("int8", (1, WHOLE), "float16")


def filled(config: KVCacheConfig | str = "kv4", batch: int = 3, tokens: int = 300) -> Any:
    kv = new_kv(config, batch, 2, 16, 400, dtype=torch.float32)
    append_(kv, torch.randn(batch, 2, tokens, 16), torch.randn(batch, 2, tokens, 16))
    return kv


def test_rows_are_selected_repeated_and_reordered() -> None:
    kv = filled()
    keys, values = dequantized(kv)
    for rows, made in (
        ([2, 0, 2, 1], select(kv, torch.tensor([2, 0, 2, 1]))),
        ([0, 0, 1, 1, 2, 2], repeat(kv, 2)),
        ([1], select(kv, torch.tensor([1]))),
    ):
        assert made.batch == len(rows)
        assert all(map(torch.equal, dequantized(made), (keys[rows], values[rows])))
        append_(made, *torch.randn(2, len(rows), 2, 1, 16))
        assert (made.tokens, kv.tokens) == (301, 300)
    places = [x.data_ptr() for x in kv.tensors()]
    reorder_(kv, torch.tensor([1, 1, 0]))
    assert all(map(torch.equal, dequantized(kv), (keys[[1, 1, 0]], values[[1, 1, 0]])))
    assert places == [x.data_ptr() for x in kv.tensors()]


def test_grown_holds_the_same_and_more() -> None:
    kv = filled(tokens=400)
    larger = grown(kv, 1000)
    assert all(map(torch.equal, dequantized(larger), dequantized(kv)))
    append_(larger, torch.randn(3, 2, 600, 16), torch.randn(3, 2, 600, 16))
    assert larger.tokens == 1000
    assert grown(kv, kv.capacity) is kv


def test_exact_tails_are_made_widened_and_reordered() -> None:
    like = new_kv(KVCacheConfig(window=0, center=False), 3, 2, 16, 1, dtype=torch.float32)
    kv = exact_like(like, 128)
    assert kv.key is like.key
    key, value = torch.randn(2, 3, 2, 400, 16).unbind()
    append_(kv, key[:, :, :200], value[:, :, :200])
    wide = widened(kv, 300)
    assert widened(wide, 300) is wide
    append_(wide, key[:, :, 200:], value[:, :, 200:])
    assert (wide.tokens, wide.coded) == (400, 0)
    assert all(map(torch.equal, dequantized(wide), (key, value)))
    rows = torch.tensor([2, 0, 0])
    reorder_(wide, rows)
    assert all(map(torch.equal, dequantized(wide), (key[rows], value[rows])))
    with pytest.raises(ConfigError, match="window=500: 128 of 300 tokens are quantized already"):
        widened(filled("kv8"), 500)


@pytest.mark.parametrize(
    ("name", "size"),
    # of 8 heads of 128 elements, one layer: 2 bytes for each scale and each zero point
    [
        ("kv8", 8 * 2 * (128 + 2)),
        ("kv_fp8", 8 * 2 * (128 + 2)),
        ("k8v4", 8 * (128 + 2 + 64 + 2 * 4)),
        ("kv4", 8 * (64 + 128 * 4 / 128 + 64 + 4)),
    ],
)
def test_bytes(name: str, size: float) -> None:
    kv = new_kv(name, 1, 8, 128, 4096)
    assert bytes_per_token(kv) == size
    tail = 256 * 8 * 128 * 2 * 2 + (0 if kv.center is None else 8 * 128 * 4) + 16
    assert kv.stored_bytes == size * 3968 + tail


class Step(nn.Module):
    """One token: appended, and attended from."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.kv = filled(name, batch=1, tokens=383)
        for place, tensor in enumerate(self.kv.tensors()):
            self.register_buffer(f"kv_{place}", tensor)

    def forward(self, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kv = self.kv.with_tensors(list(self.buffers()))
        append_(kv, key, value)
        return attend_to(kv, q)


@pytest.mark.parametrize("name", ["kv8", "kv4"])
def test_a_step_is_compiled_once_and_exported(name: str) -> None:
    eager = Step(name)
    tensors = [x.clone() for x in eager.kv.tensors()]
    tokens = [(torch.randn(1, 4, 1, 16), *torch.randn(2, 1, 2, 1, 16)) for _ in range(3)]
    expected = [eager(*each) for each in tokens]
    assert (eager.kv.tokens, eager.kv.coded) == (386, 256)

    def restarted() -> Step:
        made = Step(name)
        for to, tensor in zip(made.buffers(), tensors, strict=True):
            to.copy_(tensor)
        return made

    torch.compiler.reset()
    compiled = torch.compile(restarted(), fullgraph=True, backend="aot_eager")
    found = [compiled(*tokens[0])]
    with torch.compiler.set_stance("fail_on_recompile"):
        found += [compiled(*each) for each in tokens[1:]]
    assert all(map(torch.equal, found, expected))
    exported = torch.export.export(restarted(), tokens[0]).module()
    assert all(
        torch.equal(exported(*each), out) for each, out in zip(tokens, expected, strict=True)
    )


# -- configurations --------------------------------------------------------------------------------


def test_configurations_are_data() -> None:
    for name, config in KV_RECIPES.items():
        assert kv_config(name) is config
    config = replace(KV_RECIPES["k8v4"], window=7)
    assert config.formats(80, 96)[1].input[0].block == 96
    assert config.formats(80, 96)[0].input == ()
    assert replace(config, rotate="both").formats(80, 96)[0].input[0].block == 80


def test_names_are_suggested() -> None:
    with pytest.raises(
        UnknownNameError, match="unknown KV cache recipe 'k8v5'. Did you mean 'k8v4'"
    ):
        kv_config("k8v5")
    with pytest.raises(UnknownNameError, match="'int9'"):
        kv_config(KVCacheConfig(Spec("int9", (1, WHOLE))))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": -1}, "window=-1"),
        ({"window": 1.5}, "window=1.5"),
        ({"rotate": "keys"}, "rotate='keys' is unknown; use one of none, key, value, both"),
        ({"key": replace(INT8, block=(WHOLE, 1))}, "where tokens divides 128"),
        ({"value": replace(INT8, block=(48, 1))}, "where tokens divides 128"),
        ({"value": replace(INT8, block=(1, 1, 16))}, "where tokens divides 128"),
        ({"key": replace(INT8, act=INT8)}, "without activations, input steps and static scales"),
    ],
)
def test_formats_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_config(KVCacheConfig(**fields))


def test_layouts_that_mix_tokens_are_refused() -> None:
    config = KVCacheConfig(Spec("int8", (32,), layout="flat"))
    with pytest.raises(ConfigError, match="keep tokens and heads apart"):
        new_kv(config, 1, 2, 16, 10)


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (torch.randn(2, 2, 1, 16), "a batch of 3, 2 heads"),
        (torch.randn(3, 3, 1, 16), "a batch of 3, 2 heads"),
        (torch.randn(3, 2, 16), "a batch of 3, 2 heads"),
        (torch.randn(3, 2, 2, 16), "the same T"),
        (torch.randn(3, 2, 1, 16).bfloat16(), "key is torch.bfloat16 on cpu, and this cache is torch.f"),
        (torch.randn(3, 2, 1, 16, device="meta"), "key is torch.float32 on meta"),
    ],
)  # fmt: skip
def test_tokens_that_do_not_fit(key: Tensor, message: str) -> None:
    kv = filled()
    before = [x.clone() for x in kv.tensors()]
    for add in (append_, append):
        with pytest.raises(ConfigError, match=message):
            add(kv, key, torch.randn(3, 2, 1, 16))
    assert all(map(torch.equal, kv.tensors(), before))


def test_more_tokens_than_memory() -> None:
    kv = filled()
    more = torch.randn(2, 3, 2, kv.capacity - 299, 16)
    with pytest.raises(ConfigError, match=rf"memory for {kv.capacity}; make it with capacity"):
        append_(kv, *more)
    append_(kv, *more[..., 1:, :])
    assert kv.tokens == kv.capacity


def test_other_refusals() -> None:
    kv = filled()
    for call, message in (
        (lambda: crop_(kv, 301), "holds 300"),
        (lambda: crop_(kv, -1), "tokens=-1"),
        (lambda: select(kv, torch.tensor([3])), "rows 0 to 2"),
        (lambda: select(kv, torch.tensor([0.5])), "use integers"),
        (lambda: reorder_(kv, torch.tensor([0, 1])), "2 for a batch of 3"),
        (lambda: repeat(kv, 0), "times=0"),
        (lambda: new_kv("kv8", 0, 2, 16, 10), "batch=0"),
        (lambda: new_kv("kv8", 1, 2, 16, 10, dtype=torch.float64), "dtype=torch.float64"),
        (lambda: attend_to(kv, torch.randn(2, 2, 1, 16)), "batch of 2, and key one of 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


@pytest.mark.parametrize("outside", [True, False])
def test_inference_mode_and_a_default_device(outside: bool) -> None:
    def make() -> Any:
        return new_kv("kv4", 2, 2, 16, 100, dtype=torch.float32, device="cpu")

    key, value = torch.randn(2, 2, 2, 300, 16)
    expected = append(make(), key, value)
    kv = make() if outside else None
    with torch.inference_mode(), torch.device("meta"):
        kv = append(kv or make(), key, value)
        out = attend_to(kv, key)
        crop_(kv, 290)
        append_(kv, key[:, :, 290:], value[:, :, 290:])
        kv = repeat(kv, 1)
    assert all(map(torch.equal, dequantized(kv), dequantized(expected)))
    assert torch.equal(out, attend_to(expected, key))
