"""Small models of diffusers with random weights, and what is tried with each."""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from ao_core import QTensor, dequantize_, open_checkpoint, quantize_
from ao_hf import AoConfig
from ao_quant import quantize_checkpoint

__all__ = ["ARCHITECTURES", "COLUMNS", "Architecture", "outputs", "raw", "tried"]


@dataclass(frozen=True)
class Architecture:
    """A model, and inputs for it."""

    name: str
    make: Callable[[], Any]
    inputs: Callable[[], dict[str, Tensor]]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 48), layers_per_block=1, cross_attention_dim=32,
        attention_head_dim=8, norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def _sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=3, joint_attention_dim=32, caption_projection_dim=48, out_channels=4,
        pooled_projection_dim=40,
    )  # fmt: skip


def _flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=3, joint_attention_dim=32, pooled_projection_dim=40, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def _cogvideox() -> Any:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=24,
        text_embed_dim=40, num_layers=2, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
        max_text_seq_length=5,
    )  # fmt: skip


def _vae() -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32), norm_num_groups=8, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def _text(states: int = 32) -> dict[str, Tensor]:
    return {"timestep": torch.tensor([3]), "encoder_hidden_states": _random(1, 5, states)}


ARCHITECTURES = (
    Architecture("UNet2DConditionModel", _unet, lambda: {"sample": _random(1, 4, 8, 8), **_text()}),
    Architecture(
        "SD3Transformer2DModel",
        _sd3,
        lambda: {
            "hidden_states": _random(1, 4, 8, 8),
            "pooled_projections": _random(1, 40),
            **_text(),
        },
    ),
    Architecture(
        "FluxTransformer2DModel",
        _flux,
        lambda: {
            "hidden_states": _random(1, 16, 16),
            "pooled_projections": _random(1, 40),
            "txt_ids": torch.zeros(5, 3),
            "img_ids": torch.zeros(16, 3),
            **_text(),
            "timestep": torch.tensor([0.3]),
        },
    ),
    Architecture(
        "CogVideoXTransformer3DModel",
        _cogvideox,
        lambda: {"hidden_states": _random(1, 2, 4, 8, 8), **_text(40)},
    ),
    Architecture("AutoencoderKL", _vae, lambda: {"sample": _random(1, 3, 16, 16)}),
)

#: what is tried, in order
COLUMNS = (
    "on the fly", "save → load", "save again", "ao quantize", "adapters", "new process", "compile",
)  # fmt: skip


def outputs(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs, return_dict=False)[0]
    return found


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a plain tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def tried(
    architecture: Architecture, config: str = "int8_weight_only", columns: tuple[str, ...] = COLUMNS
) -> dict[str, str]:
    """What came of each column: "yes", or a sentence on what did not work."""
    with tempfile.TemporaryDirectory() as scratch:
        trial = _Trial(architecture, config, Path(scratch))
        found = {}
        for column in columns:
            try:
                found[column] = trial.results()[column]() or "yes"
            except Exception as error:
                text = " ".join(str(error).split())[:160]
                found[column] = f"{type(error).__name__}: {text}"
        return found


class _Trial:
    """One architecture, made, saved, and quantized while it is loaded."""

    def __init__(self, architecture: Architecture, config: str, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.inputs = architecture.inputs()
        torch.manual_seed(0)
        self.dense = architecture.make().eval()
        self.kind = type(self.dense)
        self.dense.save_pretrained(folder / "dense")
        self.model: Any = None

    def results(self) -> dict[str, Callable[[], str | None]]:
        """What is done for each column; returns a sentence where something is wrong."""
        return {
            "on the fly": self.on_the_fly,
            "save → load": self.save,
            "save again": self.save_again,
            "ao quantize": self.files,
            "adapters": self.adapters,
            "new process": self.new_process,
            "compile": self.compile,
        }

    def same(self, other: Any) -> bool:
        """Whether another model computes what the quantized one does, to the bit."""
        return torch.equal(outputs(other, self.inputs), outputs(self.model, self.inputs))

    def on_the_fly(self) -> str | None:
        """Quantized while loaded is the same as loaded and then quantized, and as its dequantized weights."""
        config = AoConfig(self.config)
        self.model = self.kind.from_pretrained(self.folder / "dense", quantization_config=config)
        other = self.kind.from_pretrained(self.folder / "dense")
        report = quantize_(other, self.config)
        if not self.same(other):
            return "it is not what quantize_ makes of the loaded model"
        if self.model.get_memory_footprint(return_buffers=False) != report.bytes_after:
            return "its memory is not that of the report"
        if not any(isinstance(p, QTensor) for p in self.model.parameters()):
            return "nothing was quantized"
        if self.same(self.dense):
            return "outputs are those of the dense model"
        dequantize_(other)
        expected, found = outputs(other, self.inputs), outputs(self.model, self.inputs)
        error = float((found - expected).norm() / expected.norm())
        return None if error < 1e-4 else f"outputs differ by {error:.2g} from the dequantized model"

    def save(self) -> str | None:
        """What was saved in one file and in several loads bit-equal."""
        quarter = self.model.get_memory_footprint() // 4
        for name, size in (("one", "5GB"), ("several", quarter)):
            self.model.save_pretrained(self.folder / name, max_shard_size=size)
            if not self.same(self.kind.from_pretrained(self.folder / name)):
                return f"the model loaded from {name} computes something else"
        several = len(list((self.folder / "several").glob("*.safetensors"))) > 1
        return None if several else "there are no shards"

    def save_again(self) -> str | None:
        """What was loaded saves bit-equal."""
        again = self.kind.from_pretrained(self.folder / "several")
        again.save_pretrained(self.folder / "again")
        first, second = (open_checkpoint(self.folder / name) for name in ("one", "again"))
        if first.entries != second.entries:
            return "other entries"
        same = all(torch.equal(raw(first.read(n)), raw(second.read(n))) for n in first.slots)
        return None if same else "other bytes"

    def files(self) -> str | None:
        """The same format made from files, without the code of the model."""
        quantize_checkpoint(self.folder / "dense", self.folder / "files", self.config)
        made = self.kind.from_pretrained(self.folder / "files")
        names, others = (
            {name for name, p in model.named_parameters() if isinstance(p, QTensor)}
            for model in (made, self.model)
        )
        if names != others:
            shown = ", ".join(f"`{name}`" for name in sorted(names ^ others)[:2])
            more = f" and {len(names ^ others) - 2} more" if len(names ^ others) > 2 else ""
            return f"yes, but files alone decide otherwise on {shown}{more}"
        return None if self.same(made) else "it computes something else"

    def adapters(self) -> str | None:
        """A step of training with LoRA changes adapters, and nothing else."""
        from peft import LoraConfig

        model = copy.deepcopy(self.model)
        names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        model.add_adapter(LoraConfig(r=2, target_modules=names))
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, 0.1)
        model(**self.inputs, return_dict=False)[0].square().mean().backward()
        if not any(p.grad is not None and p.grad.abs().sum() > 0 for p in trained):
            return "no gradient reaches the adapters"
        optimizer.step()
        frozen = [p for p in model.parameters() if isinstance(p, QTensor) and p.requires_grad]
        if frozen:
            return "quantized weights are trained"
        return "training changes nothing" if self.same(model.eval()) else None

    def new_process(self) -> str | None:
        """A process that imports ao_hf and nothing else of ao computes the same."""
        expected = self.folder / "expected.pt"
        torch.save((self.inputs, outputs(self.model, self.inputs)), expected)
        code = (
            "import ao_hf, diffusers, torch\n"
            f"model = diffusers.{self.kind.__name__}.from_pretrained({str(self.folder / 'several')!r})\n"
            f"inputs, expected = torch.load({str(expected)!r})\n"
            "with torch.no_grad():\n"
            "    found = model(**inputs, return_dict=False)[0]\n"
            "assert torch.equal(found, expected)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return None if not done.returncode else f"it fails: {done.stderr.splitlines()[-1][:160]}"

    def compile(self) -> str | None:
        """The compiled model computes the same, but for the order of sums."""
        torch.compiler.reset()
        compiled = torch.compile(self.model, fullgraph=True, dynamic=False)
        found, expected = outputs(compiled, self.inputs), outputs(self.model, self.inputs)
        error = float((found - expected).norm() / expected.norm())
        return None if error < 1e-3 else f"outputs differ by {error:.2g}"
