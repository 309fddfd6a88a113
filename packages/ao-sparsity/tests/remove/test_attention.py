"""Heads, however the code of a model finds its sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core.ext import ConfigError
from ao_sparsity import ChannelGroup, channel_groups, ln_structured, remove_channels


class Bert(nn.Module):
    """Three matrices; the code gives the width of a head, or the number of them, or both."""

    def __init__(self, hidden: int, heads: int, how: str) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, hidden // heads
        self.all_head_size = hidden
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden, hidden) for _ in range(4))
        self.how = how

    def split(self, x: Tensor) -> Tensor:
        heads = -1 if self.how == "width" else self.num_attention_heads
        width = -1 if self.how == "number" else self.attention_head_size
        return x.view(*x.shape[:-1], heads, width).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) * self.attention_head_size**-0.5
        if mask is not None:
            scores = scores + mask[:, None, None]
        found = (scores.softmax(-1) @ v).transpose(1, 2)
        last = self.all_head_size if self.how == "both" else -1
        return x + self.dense(found.reshape(*x.shape[:-1], last))


class Llama(nn.Module):
    """Heads of queries that share keys and values, rotated; the width is the code's, the number is not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.head_dim, self.how = 4, how
        self.q_proj = nn.Linear(10, 24, bias=False)
        self.k_proj, self.v_proj = nn.Linear(10, 12, bias=False), nn.Linear(10, 12, bias=False)
        self.o_proj = nn.Linear(24, 10, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2])[:, None] / 10.0 ** torch.arange(2)
        cos, sin = (torch.cat([a, a], -1) for a in (angle.cos(), angle.sin()))
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotate(q), self.rotate(k)
        if self.how == "expand":
            b, h, t, d = k.shape
            k, v = (a[:, :, None].expand(b, h, 2, t, d).reshape(b, 2 * h, t, d) for a in (k, v))
        elif self.how == "repeat":
            k, v = (a.repeat_interleave(2, dim=1) for a in (k, v))
        found = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.how == "grouped"
        )
        return x + self.o_proj(found.transpose(1, 2).flatten(2))


class Vit(nn.Module):
    """Queries, keys and values in one matrix."""

    def __init__(self, width: int, heads: int, how: str) -> None:
        super().__init__()
        self.heads, self.head_dim, self.layer, self.how = heads, width // heads, heads, how
        self.attn_dim = width
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        if self.how == "neox":  # the three of a head side by side
            q, k, v = self.qkv(x).view(b, n, self.heads, 3 * self.head_dim).chunk(3, -1)
            q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        else:
            split = (b, n, 3, self.heads, self.head_dim)
            q, k, v = self.qkv(x).reshape(split).permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.proj(found.reshape(b, n, c if self.how == "rigid" else self.attn_dim))
        return x + self.fc2(F.gelu(self.fc1(x)))


class Conv1D(nn.Module):
    """As in GPT-2: a transposed weight, and a number of features that the code gives to a view."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = (
            nf,
            nn.Parameter(torch.randn(nx, nf)),
            nn.Parameter(torch.randn(nf)),
        )

    def forward(self, x: Tensor) -> Tensor:
        found = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return found.view(*x.shape[:-1], self.nf)


class Gpt(nn.Module):
    """Two modules hold sizes, and a size of one is also that of something that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim, self.split_size, self.head_dim = 12, 12, 4
        self.c_attn, self.c_proj = Conv1D(36, 12), Conv1D(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            a.view(*a.shape[:-1], -1, self.head_dim).transpose(1, 2)
            for a in self.c_attn(x).split(self.split_size, dim=2)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.c_proj(found.transpose(1, 2).flatten(2))


class Biased(nn.Module):
    """Attention with a learned bias for each head and distance, looked up as in T5 or as in Swin."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.width = how, 4
        self.qkv, self.out = nn.Linear(10, 36), nn.Linear(12, 10)
        self.bias = nn.Embedding(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            a.unflatten(-1, (-1, self.width)).transpose(1, 2) for a in self.qkv(x).chunk(3, -1)
        )
        far = torch.arange(5)[:, None] - torch.arange(5) + 4
        bias = self.bias(far) if self.how == "t5" else self.bias.weight[far]
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.permute(2, 0, 1))
        return self.out(found.transpose(1, 2).flatten(2))


def heads_of(model: nn.Module, x: Tensor, count: int) -> ChannelGroup:
    """The group of so many heads."""
    (found,) = [g for g in channel_groups(model, x) if g.size == count and not g.reason]
    return found


@pytest.mark.parametrize(
    ("how", "changed"),
    [
        ("width", {}),
        ("number", {"num_attention_heads": (3, 2)}),
        ("both", {"num_attention_heads": (3, 2), "all_head_size": (12, 8)}),
    ],
)
def test_heads_of_bert(how: str, changed: dict[str, tuple[int, int]]) -> None:
    torch.manual_seed(0)
    model = Bert(12, 3, how)
    inputs = {"x": torch.randn(2, 5, 12), "mask": torch.tensor([[0.0] * 5, [0.0] * 4 + [-1e9]])}
    (heads,) = [g for g in channel_groups(model, inputs) if g.size == 3]
    assert heads.name == "query.weight"
    assert heads.readers == (("dense.weight", 1),)
    assert heads.select([1]) == {("query.weight", 0): [4, 5, 6, 7]}
    smaller, report = remove_channels(model, inputs, heads.select([1]))
    assert report.attributes == changed
    unchanged = {"num_attention_heads": 3, "all_head_size": 12}
    assert report.left == {k: v for k, v in unchanged.items() if k not in changed}
    assert model.num_attention_heads == 3
    assert smaller.query.weight.shape == (8, 12)
    assert smaller.dense.weight.shape == (12, 8)
    # by hand: the columns of that head are zero
    model.dense.weight.data[:, 4:8] = 0
    torch.testing.assert_close(smaller(**inputs), model(**inputs))


@pytest.mark.parametrize("how", ["expand", "repeat", "grouped"])
def test_heads_of_llama_go_with_their_keys_and_values(how: str) -> None:
    torch.manual_seed(0)
    model, x = Llama(how), torch.randn(2, 6, 10)
    heads = heads_of(model, x, 3)
    smaller, report = remove_channels(model, x, heads.select([0]))
    assert report.removed[0].size == 3
    assert smaller.q_proj.weight.shape == smaller.o_proj.weight.T.shape == (16, 10)
    assert smaller.k_proj.weight.shape == smaller.v_proj.weight.shape == (8, 10)
    assert torch.equal(smaller.q_proj.weight, model.q_proj.weight[8:])
    model.o_proj.weight.data[:, :8] = 0
    torch.testing.assert_close(smaller(x), model(x))


@pytest.mark.parametrize("how", ["vit", "neox"])
def test_heads_of_one_matrix(how: str) -> None:
    """Three heads of width 8, three matrices, three images: which 3 changes has to be found out."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Vit(24, 3, how), Vit(24, 3, how)), torch.randn(3, 5, 24)
    channels = ln_structured(model, x, 0.34)
    smaller, report = remove_channels(model, x, channels, strict=True)
    assert [(g.size, len(g.channels)) for g in report.removed] == [(3, 1), (49, 17)] * 2
    assert report.attributes == {
        f"{i}.{name}": pair
        for i in range(2)
        for name, pair in {"heads": (3, 2), "attn_dim": (24, 16)}.items()
    }
    assert smaller[0].layer == 3
    assert report.left == {"0.layer": 3, "1.layer": 3}
    assert report.difference < 1e-5


def test_layers_may_keep_different_numbers() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Bert(12, 3, "number"), Bert(12, 3, "number")), torch.randn(2, 4, 12)
    first, second = (g for g in channel_groups(model, x) if g.size == 3)
    smaller, report = remove_channels(model, x, first.select([0]) | second.select([0, 2]))
    assert [smaller[i].num_attention_heads for i in range(2)] == [2, 1]
    assert report.difference < 1e-5


def test_code_that_fixes_the_number_of_heads_keeps_them_and_says_so() -> None:
    torch.manual_seed(0)
    model, x = Vit(24, 3, "rigid"), torch.randn(2, 5, 24)
    channels = ln_structured(model, x, 0.34)
    smaller, report = remove_channels(model, x, channels)
    assert smaller.qkv.weight.shape == (72, 24)
    assert smaller.fc1.out_features == 32  # the rest goes all the same
    (kept,) = report.kept
    assert (kept.fqn, kept.dim, kept.count) == ("qkv.weight", 0, 24)
    assert "the code fixes their number" in kept.reason
    assert kept.reason in str(report)
    with pytest.raises(ConfigError, match="the code fixes their number"):
        remove_channels(model, x, channels, strict=True)


def test_what_is_inside_of_heads_is_said_to_be() -> None:
    model, x = Bert(12, 3, "width"), torch.randn(2, 5, 12)
    widths = [g for g in channel_groups(model, x) if g.size == 4]
    keys, values = sorted(widths, key=lambda g: g.reason is None)
    assert keys.inner
    assert values.inner
    assert "without a weight" in str(keys.reason)
    assert values.reason is None
    # this code has one width for keys and values
    _, report = remove_channels(model, x, values.select([0]))
    assert "the code fixes their number" in report.kept[0].reason


def test_multihead_attention_of_torch_stays_whole() -> None:
    model, x = nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 4, 12)
    inputs = (x, x, x)
    groups = channel_groups(model, inputs)
    assert all(group.reason for group in groups)
    (heads,) = [g for g in groups if "num_heads" in str(g.reason)]
    assert heads.size == 3
    _, report = remove_channels(model, inputs, heads.select([0]))
    assert not report.removed
    assert "needs embed_dim = num_heads × head_dim" in report.kept[0].reason
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("how", ["t5", "swin"])
def test_biases_of_heads_go_with_them(how: str) -> None:
    torch.manual_seed(0)
    model, x = Biased(how), torch.randn(2, 5, 10)
    heads = heads_of(model, x, 3)
    assert ("bias.weight", 1) in heads.writers
    smaller, _ = remove_channels(model, x, heads.select([1]))
    assert torch.equal(smaller.bias.weight, model.bias.weight[:, [0, 2]])
    model.out.weight.data[:, 4:8] = 0
    torch.testing.assert_close(smaller(x), model(x))


def test_sizes_that_two_modules_hold() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Gpt(), Gpt()), torch.randn(2, 5, 12)
    first, second = (g for g in channel_groups(model, x) if g.size == 3 and not g.reason)
    smaller, report = remove_channels(model, x, first.select([0]) | second.select([2]))
    assert report.attributes == {
        f"{i}.{name}": pair
        for name, pair in {"c_attn.nf": (36, 24), "split_size": (12, 8)}.items()
        for i in range(2)
    }
    assert smaller[0].c_proj.nf == smaller[0].embed_dim == 12
    model[0].c_proj.weight.data[:4] = 0
    model[1].c_proj.weight.data[8:] = 0
    torch.testing.assert_close(smaller(x), model(x))
