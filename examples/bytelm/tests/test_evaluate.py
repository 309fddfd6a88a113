"""The measures beside NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bytelm import data, evaluate
from bytelm.model import ByteLM
from torch import Tensor, nn


def logits(seed: int, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, 256, generator=torch.Generator().manual_seed(seed))


def log_softmax(x: Tensor) -> np.ndarray:
    values = x.double().numpy()
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


@pytest.fixture
def windows() -> Tensor:
    return torch.randint(256, (5, 14), generator=torch.Generator().manual_seed(2))


def test_bits_beside_numpy() -> None:
    x, targets = logits(0, 3, 7), torch.arange(21).view(3, 7) * 12
    taken = np.take_along_axis(log_softmax(x), targets.numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(evaluate.bits(x, targets).numpy(), -taken / np.log(2), rtol=1e-6)


def test_kl_beside_numpy() -> None:
    p, q = logits(0, 3, 7), logits(1, 3, 7)
    expected = (np.exp(log_softmax(p)) * (log_softmax(p) - log_softmax(q))).sum(-1) / np.log(2)
    assert expected.min() > 1
    np.testing.assert_allclose(evaluate.kl_bits(p, q).numpy(), expected, rtol=1e-12)


def test_kl_resolves_models_that_hardly_differ() -> None:
    p = logits(0, 50)
    q = p + 1e-5 * logits(1, 50)
    found = evaluate.kl_bits(p, q)
    second_order = (q - p).double()
    weights = p.double().softmax(-1)
    mean = (weights * second_order).sum(-1, keepdim=True)
    expected = (weights * (second_order - mean) ** 2).sum(-1) / 2 / np.log(2)
    assert (expected < 1e-8).all()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    assert torch.equal(evaluate.kl_bits(p, p), torch.zeros(50, dtype=torch.float64))


def test_uniform_predictions_cost_eight_bits(windows: Tensor) -> None:
    class Uniform(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.zeros(*ids.shape, 256)

    assert evaluate.bits_per_byte(Uniform(), windows) == pytest.approx(8, abs=1e-6)


def test_predictions_are_those_of_the_second_half(model: ByteLM, windows: Tensor) -> None:
    found = evaluate.predict(model, windows, batch=2)
    assert found.shape == (5, 7, 256)
    for position in range(7, 14):
        alone = model(windows[:, :position])[:, -1]
        torch.testing.assert_close(found[:, position - 7], alone, rtol=0, atol=1e-4)


def test_bits_per_byte_is_the_mean_over_all_batches(model: ByteLM, windows: Tensor) -> None:
    scored = evaluate.bits(evaluate.predict(model, windows), windows[:, 7:])
    expected = pytest.approx(float(scored.mean()), rel=1e-6)
    assert evaluate.bits_per_byte(model, windows, batch=2) == expected


def test_quality(windows: Tensor) -> None:
    original, other = logits(0, 5, 7), logits(0, 5, 7)
    other[0, 3] = original[0, 3].roll(1)  # one position of 35 finds another byte likeliest
    found = evaluate.quality(original, other, windows)
    assert found.agreement == pytest.approx(34 / 35)
    assert found.kl_bits == pytest.approx(float(evaluate.kl_bits(original, other).sum()) / 35)
    assert found.bits_per_byte == pytest.approx(float(evaluate.bits(other, windows[:, 7:]).mean()))
    same = evaluate.quality(original, original, windows)
    assert (same.kl_bits, same.agreement) == (0, 1)


def test_second_halves_of_all_windows_are_the_text() -> None:
    stream = torch.arange(103, dtype=torch.uint8)
    windows = data.spread(stream, 20)
    assert windows.shape == (9, 20)
    assert windows[:, 10:].flatten().tolist() == list(range(10, 100))
    assert windows.dtype == torch.int64
    chosen = data.spread(stream, 20, 4)
    assert chosen[:, 0].tolist() == [0, 20, 40, 60]


@pytest.mark.parametrize("count", [0, 10])
def test_more_windows_than_there_are(count: int) -> None:
    with pytest.raises(ValueError, match=rf"count={count}, but 103 bytes have 9 windows"):
        data.spread(torch.arange(103), 20, count)
