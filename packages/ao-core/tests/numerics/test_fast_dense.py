import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from ao_core.numerics import fast_dense as module
from ao_core.numerics.fast_dense import computed_fast, fast_dense

SLOW = frozenset({torch.bfloat16, torch.float16})


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    monkeypatch.setattr(module, "_slow", lambda: SLOW)


def operands(dtype, bias=True):
    shapes = [(3, 5, 97), (31, 97), *([(31,)] if bias else [])]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def check_rounded_once(out, exact, dtype):
    assert out.dtype == dtype
    step = torch.finfo(dtype).eps * exact.abs()
    assert ((out.double() - exact).abs() <= step / 2 + 1e-5 * exact.abs().max()).all()


def check_gradients(func, tensors, dtype, **options):
    tensors = [x.requires_grad_() for x in tensors]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out, exact = computed_fast(func, *tensors, **options), func(*wide, **options)
    check_rounded_once(out, exact, dtype)
    by = torch.randn_like(out)
    gradients = torch.autograd.grad(out, tensors, by)
    for found, wanted in zip(gradients, torch.autograd.grad(exact, wide, by.double()), strict=True):
        check_rounded_once(found, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_of_float32_and_rounded_once(dtype):
    check_gradients(F.linear, operands(dtype), dtype)
    qkv = [torch.randn(2, 3, 7, 16, dtype=dtype) for _ in range(3)]
    check_gradients(F.scaled_dot_product_attention, qkv, dtype, is_causal=True, scale=0.2)


def test_masks_may_be_of_another_dtype_or_none():
    q = torch.randn(1, 2, 5, 8).bfloat16()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    with fast_dense():
        named = F.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=mask)
        causal = F.scaled_dot_product_attention(q, q, q, None, 0.0, True)
    assert named.dtype == torch.bfloat16
    assert torch.equal(named, causal)


def test_autocast_rounds_operands_first():
    tensors = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16), fast_dense():
        out = F.linear(*tensors)
        assert torch.is_autocast_enabled("cpu")
    check_rounded_once(out, F.linear(*(x.bfloat16().double() for x in tensors)), torch.bfloat16)


def test_other_tensors_are_torchs():
    calls = []

    def linear(*tensors):
        calls.append([(x.device.type, x.dtype) for x in tensors])
        return F.linear(*tensors)

    computed_fast(linear, *operands(torch.float32))
    computed_fast(linear, *(x.to("meta") for x in operands(torch.bfloat16)))
    with torch.autocast("cpu"):
        computed_fast(linear, *operands(torch.float64, bias=False))
    kept = [("cpu", torch.float32), ("meta", torch.bfloat16), ("cpu", torch.float64)]
    assert [call[0] for call in calls] == kept


def test_what_is_slow_is_what_onednn_says(monkeypatch):
    monkeypatch.undo()
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (torch.bfloat16 in module._slow()) is not supported


def test_compiled_models_run_eagerly_and_are_not_compiled_again():
    counter = torch._dynamo.testing.CompileCounter()
    model = torch.compile(torch.nn.Linear(8, 8).bfloat16(), backend=counter)
    x = torch.randn(4, 8).bfloat16()
    with torch.no_grad():
        expected = model(x)
        with fast_dense():
            out = model(x)
        model(x)
    torch.testing.assert_close(out, expected)
    assert counter.frame_count == 1
