"""Small models of many architectures with random weights, and what is tried with each."""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import nn
from torch._dynamo.utils import counters
from transformers.pytorch_utils import Conv1D

from ao_core import QTensor, dequantize_, open_checkpoint, quantize_
from ao_hf import AoConfig

__all__ = ["ARCHITECTURES", "COLUMNS", "Architecture", "tried"]

#: of most language models
_TEXT = {
    "vocab_size": 112, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
_T5 = {"vocab_size": 112, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
_WHISPER = {
    "vocab_size": 112, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 16,
    "max_source_positions": 16, "max_target_positions": 32, "decoder_start_token_id": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
_MAMBA = {
    "vocab_size": 112, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1,
    "num_hidden_layers": 2, "expand": 2, "chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A model, and inputs for it."""

    name: str
    make: Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    #: what it generates text from: names of inputs; empty where it does not
    prompt: tuple[str, ...] = ()
    #: of files, so that there are several
    shard: str = "50KB"


def _tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10]])}


def _text(name: str, **options: Any) -> Architecture:
    def make() -> Any:
        config = getattr(tf, f"{name}Config")(**options)
        return getattr(tf, f"{name}ForCausalLM", None) or getattr(tf, f"{name}LMHeadModel"), config

    def made() -> Any:
        of, config = make()
        return of(config)

    return Architecture(name, made, _tokens, prompt=("input_ids",))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _image() -> dict[str, torch.Tensor]:
    return {"pixel_values": _random(1, 3, 32, 32)}


def _gpt2(name: str) -> Architecture:
    config = tf.GPT2Config(
        vocab_size=112, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
        initializer_range=0.1,
    )  # fmt: skip
    return Architecture(name, lambda: tf.GPT2LMHeadModel(config), _tokens, prompt=("input_ids",))


def _clip() -> Any:
    text = {k: v for k, v in _TEXT.items() if k not in ("num_key_value_heads",)}
    vision = dict(_VISION)
    return tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))


def _sam() -> Any:
    vision = _VISION | {
        "mlp_dim": 96, "output_channels": 32, "num_pos_feats": 16, "global_attn_indexes": [1],
        "window_size": 2, "num_hidden_layers": 2,
    }  # fmt: skip
    prompt = {
        "hidden_size": 32, "image_embedding_size": 4, "image_size": 32,
        "patch_size": 8, "mask_input_channels": 8,
    }  # fmt: skip
    mask = {
        "hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4,
        "num_hidden_layers": 2, "iou_head_hidden_dim": 32,
    }  # fmt: skip
    config = tf.SamConfig(
        vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask
    )
    return tf.SamModel(config)


ARCHITECTURES = (
    _text("Llama", **_TEXT),
    _text("Qwen3", **_TEXT, head_dim=16),
    _text("Qwen3Moe", **_TEXT, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
    _text("Mixtral", **_TEXT, **_EXPERTS),
    _text("GptOss", **_TEXT, **_EXPERTS, head_dim=16, sliding_window=16),
    Architecture(
        "Gemma3",
        lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_TEXT, head_dim=16, sliding_window=16)),
        _tokens,
        prompt=("input_ids",),
    ),
    _text("Phi", **_TEXT),
    _gpt2("GPT-2"),
    _text(
        "OPT", vocab_size=112, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
    _text("Mamba2", **_MAMBA),
    Architecture(
        "BERT",
        lambda: tf.BertForMaskedLM(
            tf.BertConfig(**{k: v for k, v in _TEXT.items() if k != "num_key_value_heads"})
        ),
        _tokens,
    ),
    Architecture(
        "ModernBERT",
        lambda: tf.ModernBertForMaskedLM(
            tf.ModernBertConfig(
                **{k: v for k, v in _TEXT.items() if k != "num_key_value_heads"},
                cls_token_id=1, sep_token_id=2, local_attention=8,
            )
        ),
        _tokens,
    ),
    Architecture(
        "T5",
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(**_T5, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
        ),
        lambda: _tokens() | {"decoder_input_ids": torch.tensor([[0, 4, 5]])},
        prompt=("input_ids",),
    ),
    Architecture(
        "Whisper",
        lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(**_WHISPER)),
        lambda: {"input_features": _random(1, 16, 32), "decoder_input_ids": torch.tensor([[1, 4, 5]])},
        prompt=("input_features",),
    ),
    Architecture("ViT", lambda: tf.ViTForImageClassification(tf.ViTConfig(**_VISION)), _image),
    Architecture(
        "CLIP",
        _clip,
        lambda: _image() | _tokens() | {"attention_mask": torch.ones(1, 6, dtype=torch.long)},
    ),
    Architecture(
        "SAM", _sam, lambda: _image() | {"input_points": torch.tensor([[[[8.0, 9.0]]]])}
    ),
)  # fmt: skip

#: columns of models that generate text
GENERATION = ("generate", "static cache", "assisted")
#: what is tried, in order
COLUMNS = (
    "on the fly", "generate", "static cache", "assisted", "save → load", "save again", "ao quantize",
    "adapters", "new process", "compile",
)  # fmt: skip


def _outputs(model: Any, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        found = model(**inputs)
    return [t for t in found.to_tuple() if isinstance(t, torch.Tensor)]


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def tried(
    architecture: Architecture, config: str = "int8_weight_only", columns: tuple[str, ...] = COLUMNS
) -> dict[str, str]:
    """What came of each column: "yes", or a sentence on what did not work."""
    with tempfile.TemporaryDirectory() as scratch:
        trial = _Trial(architecture, config, Path(scratch))
        found = {}
        for column in columns:
            if column in GENERATION and not architecture.prompt:
                found[column] = "–"
                continue
            try:
                found[column] = trial.results()[column]() or "yes"
            except Exception as error:
                text = " ".join(str(error).split())[:160]
                found[column] = f"{type(error).__name__}: {text}"
        return found


class _Trial:
    """One architecture, made, saved, and quantized while it is loaded."""

    def __init__(self, architecture: Architecture, config: str, folder: Path) -> None:
        self.config, self.folder, self.shard = config, folder, architecture.shard
        self.inputs = architecture.inputs()
        self.prompt = {name: self.inputs[name] for name in architecture.prompt}
        torch.manual_seed(0)
        self.dense = architecture.make().eval()
        self.kind = type(self.dense)
        self.dense.save_pretrained(folder / "dense")
        self.model: Any = None

    def results(self) -> dict[str, Callable[[], str | None]]:
        """What is done for each column; returns a sentence where something is wrong."""
        return {
            "on the fly": self.on_the_fly,
            "generate": self.generate,
            "static cache": self.static_cache,
            "assisted": self.assisted,
            "save → load": self.save,
            "save again": self.save_again,
            "ao quantize": self.files,
            "new process": self.new_process,
            "adapters": self.adapters,
            "compile": self.compile,
        }

    def on_the_fly(self) -> str | None:
        """Quantized while loaded is the same as loaded and then quantized, and as its dequantized weights."""
        config = AoConfig(self.config)
        self.model = self.kind.from_pretrained(self.folder / "dense", quantization_config=config)
        found = _outputs(self.model, self.inputs)
        other = self.kind.from_pretrained(self.folder / "dense")
        quantize_(other, self.config)
        if not _equal(found, _outputs(other, self.inputs)):
            return "it is not what quantize_ makes of the loaded model"
        if not any(isinstance(p, QTensor) for p in self.model.parameters()):
            return "nothing was quantized"
        if _equal(found, _outputs(self.dense, self.inputs)):
            return "outputs are those of the dense model"
        dequantize_(other)
        expected = _outputs(other, self.inputs)
        error = max(float((f - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True))
        return None if error < 1e-4 else f"outputs differ by {error:.2g} from the dequantized model"

    def _generate(self, model: Any = None, prompt: Any = None, **options: Any) -> torch.Tensor:
        torch.manual_seed(0)  # of samples, and of seeds that transformers draws
        made: torch.Tensor = (model or self.model).generate(
            **(prompt or self.prompt),
            **({"max_new_tokens": 4, "do_sample": False, "eos_token_id": None} | options),
            pad_token_id=0,
        )
        return made

    def generate(self) -> str | None:
        """Greedy with a cache, without and in a padded batch; beams and samples as the dequantized model."""
        greedy = self._generate()
        if not torch.equal(self._generate(use_cache=False), greedy):
            return "with a cache it generates something else"
        dense = copy.deepcopy(self.model)
        dequantize_(dense)
        ways = {
            "beams": {"num_beams": 3},
            "samples": {"do_sample": True, "num_return_sequences": 3},
        }
        for way, options in ways.items():
            if not torch.equal(self._generate(**options), self._generate(dense, **options)):
                return f"{way} are not those of the dequantized model"
        if "input_ids" not in self.prompt:
            return None
        ids = self.prompt["input_ids"]
        both = torch.cat([torch.cat([torch.zeros_like(ids[:, :2]), ids[:, 2:]], 1), ids])
        padded = {"input_ids": both, "attention_mask": (both > 0).long()}
        same = torch.equal(self._generate(prompt=padded)[1:], greedy)
        return None if same else "in a padded batch it generates something else"

    def static_cache(self) -> str | None:
        """A cache of a fixed size gives the same tokens."""
        made = self._generate(cache_implementation="static", disable_compile=True)
        return None if torch.equal(made, self._generate()) else "it generates something else"

    def assisted(self) -> str | None:
        """With the tokens that another model drafts, it generates the same."""
        if self.kind._is_stateful:
            return "–"
        torch.manual_seed(1)
        draft = self.kind(self.dense.config).eval()
        made = self._generate(assistant_model=draft, num_assistant_tokens=3)
        return None if torch.equal(made, self._generate()) else "it generates something else"

    def save(self) -> str | None:
        """What was saved loads bit-equal."""
        self.model.save_pretrained(self.folder / "q", max_shard_size=self.shard)
        again = self.kind.from_pretrained(self.folder / "q")
        same = _equal(_outputs(again, self.inputs), _outputs(self.model, self.inputs))
        return None if same else "the loaded model computes something else"

    def save_again(self) -> str | None:
        """What was loaded saves bit-equal."""
        again = self.kind.from_pretrained(self.folder / "q")
        again.save_pretrained(self.folder / "again", max_shard_size=self.shard)
        first, second = (open_checkpoint(self.folder / name) for name in ("q", "again"))
        if first.entries != second.entries:
            return "other entries"
        same = all(torch.equal(_raw(first.read(n)), _raw(second.read(n))) for n in first.slots)
        return None if same else "other bytes"

    def files(self) -> str | None:
        """Files alone become what loading and saving make, byte for byte where names are the same."""
        from ao_quant import quantize_checkpoint

        quantize_checkpoint(self.folder / "dense", self.folder / "files", self.config)
        made = self.kind.from_pretrained(self.folder / "files")
        if not _equal(_outputs(made, self.inputs), _outputs(self.model, self.inputs)):
            return "outputs differ"
        self.model.save_pretrained(self.folder / "fly")
        made.save_pretrained(self.folder / "loaded")
        names = ("fly", "loaded", "files")
        fly, loaded, files = (open_checkpoint(self.folder / name) for name in names)
        if others := fly.slots.keys() ^ loaded.slots.keys():
            return f"files alone decide otherwise: {', '.join(sorted(others)[:3])}"
        pairs = [(fly, loaded, name) for name in fly.slots]
        pairs += [(fly, files, name) for name in fly.slots.keys() & files.slots.keys()]
        same = all(torch.equal(_raw(a.read(n)), _raw(b.read(n))) for a, b, n in pairs)
        return None if same else "other bytes"

    def new_process(self) -> str | None:
        """A process that imports ao_hf and nothing else of ao computes the same."""
        torch.save((self.inputs, _outputs(self.model, self.inputs)), self.folder / "expected.pt")
        code = (
            "import ao_hf, torch, transformers\n"
            f"model = transformers.{self.kind.__name__}.from_pretrained({str(self.folder / 'q')!r})\n"
            f"inputs, expected = torch.load({str(self.folder / 'expected.pt')!r})\n"
            "with torch.no_grad():\n"
            "    found = [t for t in model(**inputs).to_tuple() if isinstance(t, torch.Tensor)]\n"
            "assert all(map(torch.equal, found, expected)) and len(found) == len(expected)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return None if not done.returncode else f"it fails: {done.stderr.splitlines()[-1][:160]}"

    def adapters(self) -> str | None:
        """A step of training with LoRA changes adapters, and nothing else."""
        from peft import LoraConfig, inject_adapter_in_model

        model = copy.deepcopy(self.model)
        names = {n for n, m in model.named_modules() if type(m) in (nn.Linear, Conv1D)}
        head = getattr(model, "get_output_embeddings", lambda: None)()
        names -= {n for n, m in model.named_modules() if m is head}
        if model.config.model_type == "mamba2":  # PEFT refuses it for its fused kernels
            names = {n for n in names if not n.endswith("out_proj")}
        inject_adapter_in_model(LoraConfig(r=2, target_modules=sorted(names)), model)
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, 0.1)
        sum(t.float().square().mean() for t in model(**self.inputs).to_tuple()[:1]).backward()
        grads = [p.grad for p in trained if p.grad is not None]
        if not any(g.abs().sum() > 0 for g in grads):
            return "no gradient reaches the adapters"
        optimizer.step()
        frozen = [p for p in model.parameters() if isinstance(p, QTensor) and p.requires_grad]
        return "quantized weights are trained" if frozen else None

    def compile(self) -> str | None:
        """The compiled model computes the same, but for the order of sums; with breaks of its graph."""
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(self.model)
        for found, expected in zip(
            _outputs(compiled, self.inputs), _outputs(self.model, self.inputs), strict=True
        ):
            if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
                return f"compiled, it differs by {float((found - expected).abs().max()):.2g}"
        breaks = sum(counters["graph_break"].values())
        return f"yes, with {breaks} breaks of the graph" if breaks else None


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
