"""Which weights data reaches in which order, and what the model calls meanwhile, from a run of some batches.

Batches that are alike but for the values of their tensors are run once: visits check that weights are used
alike in the others. If that reaches less than all weights, more batches are run, as for experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ao_core.calibration.gathering import Gathering, Group, over_all
from ao_core.calibration.inputs import observe
from ao_core.calibration.ranks import Ranks, ranks_of
from ao_core.calibration.samples import Sample, evaluating
from ao_core.calibration.stubs import Chain, Outputs, flattened, is_plain
from ao_core.calibration.weights import Weights
from ao_core.targets import Decision

__all__ = ["Event", "Trace", "containers", "traced"]

#: leaves of a batch that are alike where they are written alike
_VALUES = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""

    #: "enter" or "exit" of a block, or "matmul" with a weight
    kind: str
    #: the chain and the block in it
    block: tuple[int, int] = (-1, -1)
    #: of the weight
    fqn: str = ""


@dataclass
class Trace:
    """What happened, batch by batch."""

    #: containers whose children may be a chain of blocks
    chains: list[Chain]
    groups: list[Group] = field(default_factory=list)
    #: of the batches that were run
    events: list[list[Event]] = field(default_factory=list)
    #: for each batch of the data, the one that was run for it, among those of `events`
    run_for: list[int] = field(default_factory=list)
    #: (number among `events`, chain, block) -> what the block returned
    returned: dict[tuple[int, int, int], Outputs] = field(default_factory=dict)
    #: chain -> why its blocks cannot be run by themselves
    reasons: dict[int, str] = field(default_factory=dict)

    def outputs(self, batch: int, chain: int, block: int) -> Outputs:
        """What a block returns for a batch of the data."""
        return self.returned[self.run_for[batch], chain, block]

    @property
    def activation_bytes(self) -> int:
        """Bytes of what a block returns for all batches, at most."""
        sizes: dict[tuple[int, int, int], int] = {}
        for place, outputs in self.returned.items():
            sizes[place] = sum(
                leaf[0].numel() * leaf[1].itemsize for leaf in outputs.leaves if leaf is not None
            )
        most = [
            max((size for place, size in sizes.items() if place[0] == number), default=0)
            for number in range(len(self.events))
        ]
        return sum(most[number] for number in self.run_for)

    @property
    def is_traced(self) -> list[bool]:
        """For each batch of the data, whether it was run."""
        return [self.run_for.index(number) == k for k, number in enumerate(self.run_for)]

    def is_used_once(self, fqn: str) -> bool:
        """Whether every batch reaches a weight once at most."""
        return all(sum(event.fqn == fqn for event in events) <= 1 for events in self.events)


def traced(
    model: nn.Module,
    batches: Sequence[Sample],
    entries: Sequence[Decision],
    weights: Weights | None = None,
) -> Trace:
    """Run the model as it is over one of each kind of batch, and over more while weights are not reached."""
    trace = Trace(containers(model))
    gathering = Gathering({entry.fqn: () for entry in entries})

    def note(name: str, number: int, x: Tensor) -> None:
        gathering.note(name, number, x)
        trace.events[-1].append(Event("matmul", fqn=name))

    kinds: dict[Any, int] = {}
    waiting: list[int] = []

    def run(place: int) -> None:
        trace.run_for[place] = len(trace.events)
        gathering.next_batch()
        trace.events.append([])
        observe(model, batches[place], entries, note, weights)

    trace.run_for = [-1] * len(batches)
    with evaluating(model), _hooked(trace, _ambient()):
        for place, batch in enumerate(batches):
            if (kind := kinds.setdefault(_kind(batch), place)) == place:
                run(place)
            else:
                trace.run_for[place] = trace.run_for[kind]
                waiting.append(place)
        for place in waiting:
            if len(gathering.order()) == len(entries):
                break
            run(place)
    trace.groups = gathering.groups(entries)
    if (ranks := ranks_of(batches)) is not None:
        _share(trace, entries, ranks)
    return trace


def _share(trace: Trace, entries: Sequence[Decision], ranks: Ranks) -> None:
    """Make it the trace of what all ranks saw, in the order of ranks; outputs stay those of this one."""
    trace.groups = over_all(trace.groups, entries, ranks)
    seen = ranks.exchange((trace.events, trace.reasons))
    shift = sum(len(events) for events, _ in seen[: ranks.rank])
    trace.events = [each for events, _ in seen for each in events]
    trace.run_for = [number + shift for number in trace.run_for]
    trace.returned = {(n + shift, c, b): outputs for (n, c, b), outputs in trace.returned.items()}
    trace.reasons = {}
    for _, reasons in seen:
        trace.reasons = {**reasons, **trace.reasons}


def _kind(batch: Sample) -> Any:
    """Equal for batches that are alike but for the values of their tensors."""
    leaves, structure = pytree.tree_flatten(batch if isinstance(batch, tuple) else (batch,))
    return str(structure), tuple(
        (leaf.shape, leaf.dtype, leaf.device, leaf.stride())
        if is_plain(leaf)
        else (type(leaf).__name__, repr(leaf) if isinstance(leaf, _VALUES) else id(leaf))
        for leaf in leaves
    )


def containers(model: nn.Module) -> list[Chain]:
    """Modules whose children may be called one after the other; no child is in two of them."""
    found, taken = [], set[int]()
    for name, module in model.named_modules():
        children = list(module.children())
        ids = {id(child) for child in children}
        are_apart = len(ids) == len(module._modules) > 1 and not ids & taken
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and are_apart:
            found.append(Chain(name, module))
            taken |= ids
    return found


def _ambient() -> tuple[object, ...]:
    """What of torch's modes changes what a block computes."""
    autocast = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return (*autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled())


@contextmanager
def _hooked(trace: Trace, ambient: tuple[object, ...]) -> Iterator[None]:
    """Within this context calls of the children of all containers are events."""
    handles: list[Any] = []
    versions: dict[tuple[int, int], list[tuple[Tensor, int]]] = {}

    def hooks(place: tuple[int, int]) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            trace.events[-1].append(Event("enter", place))
            if _ambient() != ambient:
                trace.reasons.setdefault(
                    place[0],
                    "its blocks are called under an autocast or grad mode of the model's own",
                )
            leaves = [leaf for leaf in flattened(args, kwargs)[0] if isinstance(leaf, Tensor)]
            if any(leaf.is_inference() for leaf in leaves):
                trace.reasons.setdefault(place[0], "its blocks get tensors of inference mode")
                leaves = []
            versions[place] = [(leaf, leaf._version) for leaf in leaves]

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: Any, returned: Any) -> None:
            trace.events[-1].append(Event("exit", place))
            if any(leaf._version != version for leaf, version in versions.pop(place, [])):
                trace.reasons.setdefault(place[0], f"block {place[1]} changes its inputs in place")
            for leaf in pytree.tree_leaves(returned):
                if leaf is not None and not is_plain(leaf):
                    trace.reasons.setdefault(
                        place[0], f"block {place[1]} returns a {type(leaf).__name__}"
                    )
            trace.returned[(len(trace.events) - 1, *place)] = Outputs.of(returned)

        return before, after

    try:
        for number, chain in enumerate(trace.chains):
            for place, block in enumerate(chain.blocks):
                before, after = hooks((number, place))
                handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(block.register_forward_hook(after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
