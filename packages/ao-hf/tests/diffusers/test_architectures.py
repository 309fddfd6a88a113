"""What docs/hf/diffusers-architectures.md says of architectures."""

import pytest

QUICK = ("on the fly", "save → load", "save again", "ao quantize", "adapters")
NAMES = (
    "UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel", "CogVideoXTransformer3DModel",
    "AutoencoderKL",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, "int8_weight_only") for name in NAMES),
        *((name, "int4_weight_only") for name in NAMES[1:]),  # a UNet has nothing that a VAE lacks
    ],
)
def test_quick_columns(trials, named, name, config):
    assert trials.tried(named[name], config, QUICK) == dict.fromkeys(QUICK, "yes")


@pytest.mark.slow
def test_slow_columns(trials, named):
    columns = ("on the fly", "save → load", "new process", "compile")
    found = trials.tried(named["FluxTransformer2DModel"], columns=columns)
    assert found == dict.fromkeys(columns, "yes")
