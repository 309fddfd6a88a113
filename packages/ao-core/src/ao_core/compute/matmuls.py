"""`Matmuls`: how each of the three matmuls of a linear layer is computed."""

from __future__ import annotations

from typing import NamedTuple

from ao_core.spec import WHOLE, Spec

__all__ = ["DELAYED", "FAKE_QUANTIZE", "RULE_OPTIONS", "Matmuls", "rule_name"]

#: option of a spec: the name of a fake-quantize rule, see `fake_quantize`
FAKE_QUANTIZE = "fake_quantize"
#: option beside it: the rule waits, and all matmuls are in high precision until it is taken away
DELAYED = "delayed"
#: further options beside it, which say how the weight will be stored, see `encoded`
RULE_OPTIONS = (
    "scale_method",
    "act_scale",
    "act_zero_point",
    "filters",
    "in_out",
    "rank",
    "alpha",
    DELAYED,
)


class Matmuls(NamedTuple):
    """The three matmuls of a linear layer, each ``a @ b.T``; None: in high precision.

    A `Spec` says how b is cast and, in its `act`, how a is. Metadata of traced tensors, so primitives only.
    """

    #: a = input (M, K), b = weight (N, K)
    output: Spec | None = None
    #: a = gradient of the output (M, N), b = weight transposed (K, N)
    grad_input: Spec | None = None
    #: a = gradient of the output transposed (N, M), b = input transposed (K, M)
    grad_weight: Spec | None = None

    @property
    def any_low(self) -> bool:
        """Whether one of them is in low precision."""
        return self != Matmuls()

    def text(self) -> str:
        """What they compute in, e.g. for a report."""
        texts = {name: _matmul_text(spec) for name, spec in self._asdict().items()}
        if len(set(texts.values())) == 1:
            return f"all three matmuls {texts['output']}"
        return ", ".join(f"{name} {text}" for name, text in texts.items())


def rule_name(spec: Spec | None) -> str:
    """The name of the rule in a spec; empty where it has none."""
    if spec is None or not spec.options:
        return ""
    return str(spec.option(FAKE_QUANTIZE, ""))


def _matmul_text(spec: Spec | None) -> str:
    if spec is None:
        return "in high precision"
    a = "as it is" if spec.act is None else _operand_text(spec.act)
    by = f" by {rule_name(spec)}" if rule_name(spec) else ""
    return f"{a} × {_operand_text(spec)}{by}"


def _operand_text(spec: Spec) -> str:
    block = "×".join("*" if extent == WHOLE else str(extent) for extent in spec.block)
    return f"{spec.dtype}[{block}]"
