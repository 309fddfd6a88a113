"""`explain`: which kernel serves a quantized weight, and why none of the others does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ao_core.arguments import checked
from ao_core.compute import ComputeWeight
from ao_core.compute.matmuls import rule_name
from ao_core.dispatch import Candidate, candidates, matmul_op
from ao_core.errors import ConfigError
from ao_core.records import Call
from ao_core.spec import Spec
from ao_core.tensor import QTensor, is_converted
from ao_core.tensor.convolutions import matrix_of

__all__ = [
    "ROWS",
    "CallExplanation",
    "Explanation",
    "WeightExplanation",
    "explain",
    "explain_tensor",
    "explain_weight",
]

#: batch sizes that are explained where no sample input is given
ROWS = (1, 32, 512)


@dataclass(frozen=True)
class CallExplanation:
    """The candidates for one call, best first; the first that does not refuse serves it."""

    op: str
    #: of the second operand; of a `ComputeWeight` it differs from matmul to matmul
    spec: Spec
    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    candidates: tuple[Candidate, ...]
    #: of the three of a `ComputeWeight`: "output", "grad_input" or "grad_weight"
    matmul: str = ""

    @property
    def winner(self) -> Candidate | None:
        """The kernel that serves the call, or None where all refuse."""
        return next((c for c in self.candidates if c.refusal is None), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        winner = self.winner
        return {
            "op": self.op,
            "matmul": self.matmul,
            "spec": self.spec.to_dict(),
            "x_shape": list(self.x_shape),
            "x_dtype": _name(self.x_dtype),
            "winner": None if winner is None else winner.kernel.name,
            "candidates": [
                {
                    "kernel": c.kernel.name,
                    "provider": c.provider,
                    "priority": c.kernel.priority,
                    "refusal": c.refusal,
                    "description": c.description,
                    "before": list(c.before),
                    "fused": list(c.fused),
                }
                for c in self.candidates
            ],
        }


@dataclass(frozen=True)
class WeightExplanation:
    """One tensor, quantized or computed with in low precision, and the calls it may get."""

    #: first name of the parameter; empty for a tensor that belongs to no model
    fqn: str
    #: None: it is dense in memory, a `ComputeWeight`
    spec: Spec | None
    #: as stored
    shape: tuple[int, ...]
    #: logical
    dtype: torch.dtype
    device: str
    calls: tuple[CallExplanation, ...]
    #: why no kernel is chosen for some or all uses; empty if there is nothing to add
    note: str = ""
    #: other names of the same tensor
    tied: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "fqn": self.fqn,
            "tied": list(self.tied),
            "spec": None if self.spec is None else self.spec.to_dict(),
            "shape": list(self.shape),
            "dtype": _name(self.dtype),
            "device": self.device,
            "note": self.note,
            "calls": [call.to_dict() for call in self.calls],
        }


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str()` is readable text that groups weights with equal results."""

    weights: tuple[WeightExplanation, ...]

    def __iter__(self) -> Iterator[WeightExplanation]:
        return iter(self.weights)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"weights": [weight.to_dict() for weight in self.weights]}

    def __str__(self) -> str:
        alike: dict[str, list[WeightExplanation]] = {}
        for weight in self.weights:
            alike.setdefault(_body(weight), []).append(weight)
        if not alike:
            return "nothing here is quantized"
        return "\n\n".join(_title(group) + body for body, group in alike.items())


@checked
def explain(
    model_or_qtensor: nn.Module | Tensor, x: Tensor | None = None, *, rows: Sequence[int] = ROWS
) -> Explanation:
    """Show which kernel serves each quantized weight, and why. Computes nothing.

    Args:
        model_or_qtensor: a module, whose quantized parameters are explained, or one `QTensor` or
            `ComputeWeight`.
        x: a sample input; only shape and dtype are used. Floating point: activations of every layer have
            its dtype, and all its dimensions except the last. Integer: token ids, so activations have
            all its dimensions, in the logical dtype of the weight.
        rows: without `x`, the batch sizes to explain, in the logical dtype of the weight.

    Raises:
        ConfigError: `model_or_qtensor` is neither, or `x` does not fit the tensor.
    """
    if isinstance(model_or_qtensor, nn.Module):
        return Explanation(tuple(_explain_model(model_or_qtensor, x, rows)))
    if isinstance(model_or_qtensor, ComputeWeight):
        return Explanation((_explain_compute(model_or_qtensor, "", (), x, rows),))
    if not isinstance(model_or_qtensor, QTensor):
        kind = type(model_or_qtensor).__name__
        raise ConfigError(f"model_or_qtensor is a {kind}; explain takes a module or a QTensor")
    op = "linear" if x is None or x.is_floating_point() else "embedding"
    if op == "linear" and x is not None and model_or_qtensor.dim() == 2:
        _check_input(x, model_or_qtensor)
    return Explanation((explain_tensor(model_or_qtensor, ops=(op,), x=x, rows=rows),))


def explain_tensor(
    w: QTensor,
    *,
    fqn: str = "",
    tied: tuple[str, ...] = (),
    ops: Sequence[str] = ("linear",),
    x: Tensor | None = None,
    rows: Sequence[int] = ROWS,
) -> WeightExplanation:
    """`explain` for one tensor under a name, used in these ops; "linear" stands for any matmul."""
    shape, device = w.stored_shape, w.device.type
    if w.is_permuted:
        note = f"a transposed or flattened view {tuple(w.shape)} is dequantized for each matmul"
        return WeightExplanation(fqn, w.spec, shape, w.dtype, device, (), note, tied)
    return explain_weight(
        w.spec, shape, w.dtype, device, fqn=fqn, tied=tied, ops=ops, x=x, rows=rows
    )


def explain_weight(
    spec: Spec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    *,
    fqn: str = "",
    tied: tuple[str, ...] = (),
    ops: Sequence[str] = ("linear",),
    x: Tensor | None = None,
    rows: Sequence[int] = ROWS,
) -> WeightExplanation:
    """The same for a weight that need not exist, of stored `shape` and logical `dtype`."""
    note, matmul = "", matmul_op(shape)
    if matmul is None or not ops:
        ops, note = (), f"a weight of {len(shape)} dimensions is dequantized for each matmul"
    elif matmul != "linear":
        ops = (matmul,)
    calls = tuple(
        _call(spec, shape, device, op, leading, _activations(x, dtype))
        for op in ops
        for leading in _leading(x, rows)
    )
    return WeightExplanation(fqn, spec, shape, dtype, device, calls, note, tied)


def _explain_model(
    model: nn.Module, x: Tensor | None, rows: Sequence[int]
) -> Iterator[WeightExplanation]:
    owners: dict[int, list[tuple[str, nn.Module, Tensor]]] = {}
    for module_fqn, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if is_converted(parameter):
                fqn = f"{module_fqn}.{name}" if module_fqn else name
                owners.setdefault(id(parameter), []).append((fqn, module, parameter))
    for group in owners.values():
        names = tuple(fqn for fqn, _, _ in group)
        weight = group[0][2]
        if isinstance(weight, ComputeWeight):
            yield _explain_compute(weight, names[0], names[1:], x, rows)
        elif isinstance(weight, QTensor):
            module = group[0][1]
            if isinstance(module, _ConvNd) and weight.spec.act is not None:
                yield _explain_filters(weight, module.groups, names[0], names[1:], rows)
                continue
            ops = tuple(dict.fromkeys(op for _, module, _ in group if (op := _op(module))))
            yield explain_tensor(weight, fqn=names[0], tied=names[1:], ops=ops, x=x, rows=rows)


def _explain_filters(
    w: QTensor, groups: int, fqn: str, tied: tuple[str, ...], rows: Sequence[int]
) -> WeightExplanation:
    """A convolution whose activations are quantized: the matmul of what its input unfolds to."""
    shape, found = w.stored_shape, matrix_of(w.spec, w.stored_shape, groups)
    if found is None:
        note = (
            f"a convolution in {groups} groups: no kernel takes them, so activations are rounded, and values "
            f"multiplied in their own dtype"
        )
        return WeightExplanation(fqn, w.spec, shape, w.dtype, w.device.type, (), note, tied)
    spec, matrix = found
    seen = explain_weight(spec, matrix, w.dtype, w.device.type, rows=rows)
    note = f"a convolution: the matmul of its filters, {matrix}, with what the input unfolds to"
    return replace(seen, fqn=fqn, spec=w.spec, shape=shape, note=note, tied=tied)


def _explain_compute(
    w: ComputeWeight, fqn: str, tied: tuple[str, ...], x: Tensor | None, rows: Sequence[int]
) -> WeightExplanation:
    """The matmuls of a linear layer, or of experts, each for the shapes it would have."""
    *experts, n, k = w.transpose(-2, -1).shape if w.transposed else w.shape
    op = "grouped_mm" if experts else "mm"
    device, dtype = w.device.type, _activations(x, w.dtype)
    calls = []
    for leading in _leading(x, rows):
        m = prod(leading)
        # a @ b.T: shapes of a and of b; see `ComputeWeight`
        shapes = {
            "output": ((m, k), (*experts, n, k)),
            "grad_input": ((m, n), (*experts, k, n)),
            "grad_weight": ((n, m), (k, m)),
        }
        for (matmul, (a, b)), spec in zip(shapes.items(), w.matmuls, strict=True):
            if spec is not None and not rule_name(spec):
                found = candidates(Call(op, spec, b, a, dtype, device))
                calls.append(CallExplanation(op, spec, a, dtype, tuple(found), matmul))
    used = [matmul for matmul, spec in zip(shapes, w.matmuls, strict=True) if spec is not None]
    left = ", ".join(matmul for matmul in shapes if matmul not in used)
    note = f"in high precision: {left}" if left else ""
    if rule := rule_name(w.matmuls.output):
        rounded = f"output: the matmul of the weight as the rule {rule!r} rounds it"
        note = "; ".join(filter(None, (rounded, note and f"{note}, of rounded operands")))
    shape = (*experts, n, k)
    return WeightExplanation(fqn, None, shape, w.dtype, device, tuple(calls), note, tied)


def _op(module: nn.Module) -> str:
    """The op in which a module uses its weight; empty for the filters of a convolution."""
    if isinstance(module, _ConvNd):
        return ""
    return "embedding" if isinstance(module, nn.Embedding) else "linear"


def _check_input(x: Tensor, w: QTensor) -> None:
    if x.dim() == 0 or x.shape[-1] != w.shape[1]:
        raise ConfigError(
            f"x has the shape {tuple(x.shape)}; the last dimension must be {w.shape[1]}, for a "
            f"weight of {tuple(w.shape)}"
        )


def _leading(x: Tensor | None, rows: Sequence[int]) -> list[tuple[int, ...]]:
    """Dimensions of the activations, the features left out."""
    if x is None:
        return [(m,) for m in rows]
    return [tuple(x.shape[:-1] if x.is_floating_point() else x.shape)]


def _activations(x: Tensor | None, dtype: torch.dtype) -> torch.dtype:
    return x.dtype if x is not None and x.is_floating_point() else dtype


def _call(
    spec: Spec,
    shape: tuple[int, ...],
    device: str,
    op: str,
    leading: tuple[int, ...],
    dtype: torch.dtype,
) -> CallExplanation:
    x_shape, x_dtype = (*leading, shape[-1]), dtype
    if op == "embedding":
        x_shape, x_dtype = leading, torch.int64
    elif op == "grouped_linear":  # tokens in rows, as they are when sorted by expert
        x_shape = (prod(leading), shape[-1])
    found = candidates(Call(op, spec, shape, x_shape, x_dtype, device))
    return CallExplanation(op, spec, x_shape, x_dtype, tuple(found))


# -- text ----------------------------------------------------------------------------------------


def _title(group: list[WeightExplanation]) -> str:
    """Names of weights that fare alike, the first ones spelled out."""
    names = [name for weight in group for name in (weight.fqn, *weight.tied) if name]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}\n" if names else ""


def _body(weight: WeightExplanation) -> str:
    form = "in high-precision memory" if weight.spec is None else str(weight.spec)
    lines = [f"  {weight.shape} {form}, {_name(weight.dtype)} on {weight.device}"]
    if weight.note:
        lines.append(f"  {weight.note}")
    alike: dict[tuple[Any, ...], list[CallExplanation]] = {}
    for call in weight.calls:
        title = f"{call.op} for {call.matmul}, {call.spec}," if call.matmul else call.op
        alike.setdefault((title, call.x_dtype, call.candidates), []).append(call)
    for (title, x_dtype, found), calls in alike.items():
        shapes = ", ".join(str(call.x_shape) for call in calls)
        lines.append(f"  {title} of {shapes} {_name(x_dtype)}")
        winner = calls[0].winner
        lines += [f"    {_line(candidate, candidate is winner)}" for candidate in found]
        if winner is None:
            lines.append("    no kernel serves it")
    return "\n".join(lines)


def _line(candidate: Candidate, wins: bool) -> str:
    kernel = candidate.kernel
    who = f"{kernel.name} ({candidate.provider}, priority {kernel.priority})"
    if wins:
        notes = [
            candidate.description,
            f"takes the input steps {', '.join(candidate.fused)} itself" if candidate.fused else "",
            f"after the input steps {', '.join(candidate.before)}" if candidate.before else "",
        ]
        text = "; ".join(filter(None, notes))
        return f"→ {who}: {text}" if text else f"→ {who}"
    return f"  {who}: {candidate.refusal or 'would serve it too, at a lower priority'}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
