"""A small Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU, over bytes.

Modules and parameters have the names that `transformers.LlamaForCausalLM` gives them, so that
checkpoints and configurations written for that model fit this one too, and the other way round.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

#: file names in the folder of a checkpoint
WEIGHTS, CONFIG = "model.safetensors", "config.json"
#: the checkpoint that is kept with the sources
PRETRAINED = Path(__file__).parents[1] / "checkpoint"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the head is a matrix of its own."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    #: one token for each byte
    vocab_size: int = 256

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads


def rope_angles(length: int, head_dim: int, theta: float) -> Tensor:
    """Angles of the rotary embedding (Su et al. 2021, arXiv 2104.09864), (length, head_dim / 2)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return torch.outer(torch.arange(length, dtype=torch.float64), theta**-exponents)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of each head's features, x: (..., T, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each after a norm and added to what came in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Everything below the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        angles = rope_angles(ids.shape[1], self.config.head_dim, self.config.rope_theta)
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class ByteLM(nn.Module):
    """Logits of the next byte: (B, T) bytes as integers -> (B, T, 256)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.model(ids))


def initialize(model: ByteLM, seed: int) -> None:
    """Normal weights of deviation 0.02, those that end in the residual stream smaller by depth."""
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * model.config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                parameter.normal_(0.0, 0.02 * scale, generator=generator)


def save(model: ByteLM, folder: Path) -> None:
    """Write weights in bfloat16 and the configuration, as transformers would name them."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = ByteLM(model.config)  # a model in training may have weights of another tensor class
    plain.load_state_dict(model.state_dict())
    state = {name: tensor.to(torch.bfloat16) for name, tensor in plain.state_dict().items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.config),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(folder: Path = PRETRAINED) -> ByteLM:
    """The model of a checkpoint, in float32, for inference."""
    data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config = ModelConfig(**{name: data[name] for name in ModelConfig.__dataclass_fields__})
    with torch.device("meta"):
        model = ByteLM(config)
    state = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)
