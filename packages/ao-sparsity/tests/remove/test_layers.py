"""Which layers share channels, and that the smaller model computes what the dense one does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import Spec, quantize_tensor
from ao_sparsity import channel_groups, ln_structured, remove_channels


class Gated(nn.Module):
    """SwiGLU with gate and up in one matrix."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate_up, self.down, self.how = nn.Linear(6, 20), nn.Linear(10, 6), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate_up(x)
        if self.how == "glu":
            return self.down(F.glu(h))
        half = h.shape[-1] // 2
        gate, up = h.chunk(2, -1) if self.how == "chunk" else (h[..., :half], h[..., half:])
        return self.down(F.silu(gate) * up)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.norm(self.b(F.relu(self.a(x)))) + x)


class Branches(nn.Module):
    """Concatenated channels, as in DenseNet and U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(3, 5, 1), nn.Conv1d(3, 7, 3, padding=1)
        self.c = nn.Conv1d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cat([self.a(x).tanh(), self.b(x).relu()], 1))


class Transposed(nn.Module):
    """A weight as `x @ w`, one through `einsum`, and one that two others make."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 9))
        self.v = nn.Parameter(torch.randn(9, 7))
        self.low, self.high = nn.Parameter(torch.randn(3, 7)), nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("btk,kn->btn", (x @ self.w).relu(), self.v)
        return F.linear(h.relu(), self.high @ self.low)


class Tied(nn.Module):
    """An autoencoder whose decoder is the transposed encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 10, bias=False), nn.Linear(10, 6)
        self.decoder.weight = nn.Parameter(torch.zeros(6, 10))
        self.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder.bias + self.encoder(x).relu() @ self.weight


class Scaled(nn.Module):
    """Hidden features with a scale of their own, a prelu, and padding of another dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 11), nn.Linear(11, 3)
        self.scale, self.act = nn.Parameter(torch.randn(11)), nn.PReLU(11)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x) * self.scale)
        h = F.pad(h, (0, 0, 1, 2)).clamp(max=2.0)
        return self.b(torch.stack([h, h + 1.0]).sum(0)[:, None].squeeze(1).mean(0, keepdim=True))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), Residual(12)),
        *(nn.MaxPool2d(2), nn.Conv2d(12, 12, 3, groups=12), nn.Conv2d(12, 24, 1, groups=4)),
        *(nn.GroupNorm(4, 24), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Dropout2d()),
        *(nn.ConvTranspose2d(24, 9, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(36, 5)),
    )


def model_of(name: str) -> tuple[nn.Module, Tensor, list[int]]:
    """Model, example input, and the sizes of all groups that can go, in order."""
    torch.manual_seed(0)
    sequence, image = torch.randn(2, 5, 6), torch.randn(2, 3, 14, 14)
    if name in ("chunk", "slice", "glu"):
        return Gated(name), sequence, [10]
    return {
        "mlp": lambda: (
            nn.Sequential(
                nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 9), nn.ReLU(), nn.Linear(9, 5)
            ),
            sequence,
            [13, 9],
        ),
        "cnn": lambda: (cnn(), image, [4, 12, 9]),
        "branches": lambda: (Branches(), torch.randn(2, 3, 8), [5, 7]),
        "transposed": lambda: (Transposed(), torch.randn(2, 3, 5), [9, 7, 3]),
        "tied": lambda: (Tied(), torch.randn(3, 6), [10]),
        "scaled": lambda: (Scaled(), torch.randn(2, 4), [11]),
        "unbatched": lambda: (
            nn.Sequential(nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.Conv2d(6, 2, 1)),
            image[0],
            [6],
        ),
        "encoder": lambda: (
            nn.TransformerEncoderLayer(6, 2, 10, batch_first=True),
            sequence,
            [10],
        ),
        "encoder, frozen": lambda: (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(6, 2, 10, norm_first=True), 2, enable_nested_tensor=False
            )
            .eval()
            .requires_grad_(False),
            sequence,
            [10, 10],
        ),
    }[name]()


NAMES = [
    *("mlp", "chunk", "slice", "glu", "cnn", "branches", "transposed", "tied", "scaled"),
    *("unbatched", "encoder", "encoder, frozen"),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_smaller_model_is_equal(name: str) -> None:
    model, x, sizes = model_of(name)
    before = copy.deepcopy(model.state_dict())
    channels = ln_structured(model, (x,), 0.4)
    groups = [g for g in channel_groups(model, x) if not (g.reason or g.inexact or g.inner)]
    assert [g.size for g in groups] == sizes
    smaller, report = remove_channels(model, (x,), channels, strict=True)
    assert [len(group.channels) for group in report.removed] == [round(0.4 * n) for n in sizes]
    assert report.difference < 1e-5
    assert smaller.training == model.training
    assert type(smaller) is type(model)
    # the model is as it was, and nothing is shared
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    pointers = {p.data_ptr() for p in model.parameters()}
    assert not pointers & {p.data_ptr() for p in smaller.parameters()}
    # it can be trained, and its rows are as long as its layers say
    for module in smaller.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        if isinstance(module, nn.Conv2d):
            inputs = module.in_channels // module.groups
            assert module.weight.shape[:2] == (module.out_channels, inputs)
    smaller.train()
    if any(p.requires_grad for p in smaller.parameters()):
        smaller(x).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_it_is_what_the_dense_model_computes_that_does_not_read_them(dtype: torch.dtype) -> None:
    """By hand: columns of zeros in the layer that reads, and rows that are left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 5)).to(dtype)
    model[0].bias.data += 3.0  # GELU of it is far from zero: columns count, not rows
    x = torch.randn(4, 6, dtype=dtype)
    gone = [0, 7, 12]
    smaller, report = remove_channels(model, x, {"0.weight": gone})
    stay = [i for i in range(13) if i not in gone]
    assert torch.equal(smaller[0].weight, model[0].weight[stay])
    assert torch.equal(smaller[0].bias, model[0].bias[stay])
    assert torch.equal(smaller[2].weight, model[2].weight[:, stay])
    assert torch.equal(smaller[2].bias, model[2].bias)
    masked = copy.deepcopy(model)
    masked[2].weight.data[:, gone] = 0
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(smaller(x), masked(x), rtol=tolerance, atol=tolerance)
    assert report.difference <= tolerance
    # zero rows and zero biases would have been something else
    assert (masked(x) - model(x)).abs().max() > 0.1


def test_parameters_keep_what_they_have() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    model[2].weight.requires_grad_(False)
    model[4].double()
    model.insert(4, Double())
    smaller, _ = remove_channels(model, torch.randn(3, 4), {"0.weight": [1], "2.weight": [2, 5]})
    for old, new in zip(model.parameters(), smaller.parameters(), strict=True):
        assert (old.dtype, old.requires_grad) == (new.dtype, new.requires_grad)
    assert [tuple(p.shape) for p in smaller.parameters()] == [
        (5, 4), (5,), (4, 5), (4,), (2, 4), (2,),
    ]  # fmt: skip


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def test_tied_weights_stay_tied() -> None:
    model, x, _ = model_of("tied")
    smaller, _ = remove_channels(model, x, {"weight": [0, 9]})
    assert smaller.weight is smaller.encoder.weight
    assert smaller.weight.shape == (8, 6)
    assert smaller.decoder.weight.shape == (6, 10)  # nothing reads it


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.b(self.a(x)).relu()).relu())


def test_a_layer_that_is_called_twice() -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(4, 6)
    smaller, _ = remove_channels(model, x, {"b.weight": [2, 3]})
    assert (smaller.b.in_features, smaller.b.out_features) == (6, 6)
    model.b.weight.data[:, 2:4] = 0
    model.c.weight.data[:, 2:4] = 0
    torch.testing.assert_close(smaller(x), model(x))


def test_quantized_weights_stay_and_others_go() -> None:
    torch.manual_seed(0)
    model, x, _ = model_of("mlp")
    model.requires_grad_(False)
    weight = quantize_tensor(model[0].weight, Spec("int8", (1, 6), "float32"))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    smaller, report = remove_channels(model, x, {"2.weight": [1], "2.bias": [4], "0.bias": [0]})
    assert [group.channels for group in report.removed] == [(1, 4)]
    assert [(kept.fqn, kept.reason) for kept in report.kept] == [
        ("0.bias", "seen as another dtype")
    ]
    assert torch.equal(smaller[0].weight.dequantize(), weight.dequantize())


def test_buffers_go_too() -> None:
    model, x, _ = model_of("cnn")
    with torch.no_grad():
        model(x)  # statistics that differ by channel
    smaller, _ = remove_channels(model, x, {"3.a.weight": [0], "0.bias": [0, 3, 6, 9]})
    assert smaller[1].running_mean.shape == (8,)
    assert smaller[1].num_features == 8
    kept = [i for i in range(12) if i % 3]
    assert torch.equal(smaller[1].running_var, model[1].running_var[kept])


def test_in_place_it_is_the_same_object() -> None:
    model, x, _ = model_of("chunk")
    expected, _ = remove_channels(model, x, {"down.weight": [], ("down.weight", 1): [3, 4]})
    down = model.down
    same, report = remove_channels(model, x, {("down.weight", 1): [3, 4]}, inplace=True)
    assert same is model
    assert same.down is down
    assert down.in_features == 8
    assert report.removed[0].channels == (3, 4)
    assert torch.equal(same(x), expected(x))


def test_it_can_be_exported_and_cut_again() -> None:
    model, x, _ = model_of("mlp")
    smaller, _ = remove_channels(model, x, ln_structured(model, x, 0.5))
    program = torch.export.export(smaller, (x,))
    torch.testing.assert_close(program.module()(x), smaller(x))
    again, report = remove_channels(smaller, x, ln_structured(smaller, x, 0.5))
    assert again[0].out_features == 3  # 13 - 6, and 7 - 4: halves are rounded to even
    assert not report.kept
