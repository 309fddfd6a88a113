import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ao_sparsity.masks import block_mask, block_scores, n_of_m_mask


@given(
    st.integers(1, 9), st.integers(1, 40), st.integers(1, 8), st.data(), st.integers(0, 2**31 - 1)
)
def test_n_of_m_is_exact_and_keeps_the_greatest(rows, k, m, data, seed):
    n = data.draw(st.integers(0, m))
    scores = np.random.default_rng(seed).integers(-3, 4, (rows, k)).astype(np.float32)
    kept = n_of_m_mask(torch.from_numpy(scores), n, m).numpy()
    for row, keep in zip(scores, kept, strict=True):
        for start in range(0, k, m):
            group = row[start : start + m]
            expected = sorted(range(len(group)), key=lambda i: (-group[i], i))[:n]
            assert sorted(expected) == list(np.flatnonzero(keep[start : start + m]))


@pytest.mark.parametrize(("n", "m"), [(3, 2), (-1, 4), (0, 0)])
def test_n_of_m_needs_n_within_m(n, m):
    with pytest.raises(ValueError, match=f"n={n}, m={m}"):
        n_of_m_mask(torch.ones(4), n, m)


@given(
    st.integers(1, 33), st.integers(1, 33), st.integers(1, 8), st.integers(1, 8), st.floats(0, 1)
)
def test_blocks_are_exact(n, k, rows, columns, sparsity):
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 37 + k))
    scores = block_scores(weight, (rows, columns))
    kept = block_mask(weight, (rows, columns), sparsity)
    tops = kept[::rows, ::columns]
    assert tops.shape == scores.shape == (-(-n // rows), -(-k // columns))
    assert int(tops.sum()) == scores.numel() - round(sparsity * scores.numel())
    assert torch.equal(
        tops.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k], kept
    )
    first = (weight[:rows, :columns].double() ** 2).sum().sqrt()
    torch.testing.assert_close(scores[0, 0], first, rtol=1e-12, atol=0)
    if tops.any() and not tops.all():
        assert scores[tops].min() >= scores[~tops].max()


def test_sparsity_is_a_share():
    with pytest.raises(ValueError, match="sparsity=1.5"):
        block_mask(torch.ones(4, 4), (2, 2), 1.5)
