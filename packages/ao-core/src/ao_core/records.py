"""The records that plugins hand to the registry: frozen data with pure functions, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc, signature
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ao_core.arguments import check_fields
from ao_core.errors import ConfigError
from ao_core.spec import Spec
from ao_core.steps import check_kinds

if TYPE_CHECKING:
    from ao_core.calibration.block import Block, BlockWeight
    from ao_core.calibration.statistics import Statistic, Statistics
    from ao_core.config import Config

__all__ = [
    "DTYPE_KINDS",
    "Algorithm",
    "Call",
    "DType",
    "Kernel",
    "Op",
    "OpCall",
    "Recipe",
    "ScaleMethod",
    "Skip",
    "Solved",
    "Target",
    "Transform",
]

#: what `DType.kind` may be
DTYPE_KINDS = ("int", "float", "lut", "codebook", "dense")


@dataclass(frozen=True)
class DType:
    """A number format: which values its codes stand for.

    A *code* is the bit pattern of one element in the low `bits` of a uint8 (two's complement for
    signed integers), or of a dense format the value itself in `storage`. `encode` and `decode` know
    nothing of scales, shapes or storage.
    """

    #: its name in the registry, which `Spec.dtype` refers to
    name: str
    bits: int
    #: one of `DTYPE_KINDS`. "int": the values are integers, in two's complement where `min` is negative; only
    #: these have integer zero points. "float": values are denser towards 0, where a zero point puts the
    #: middle of a range. "lut": any other values. "codebook": values are learned for each block and
    #: stored as its scale, with one more dimension. "dense": codes are the values, without a scale.
    kind: str
    #: real values (float32 or float64) -> codes, of `code_dtype`: the nearest value, saturating; NaN per
    #: format. A tie goes to the even integer ("int"), the even code ("float", "dense") or the lower value
    #: ("lut").
    encode: Callable[[Tensor], Tensor]
    #: codes -> float32 values, exact; a new tensor, since callers work on it in place
    decode: Callable[[Tensor], Tensor]
    #: least and greatest finite value
    min: float
    max: float
    #: the magnitude that a block's largest element is scaled to when there is no zero point; of integers
    #: in small blocks it is `max`, see `numerics.quant_max_of`
    quant_max: float
    #: torch dtype whose elements are the codes, for layouts that store one by one: of 8 bits unless dense
    storage: torch.dtype = torch.uint8
    #: one line for `ao formats`
    summary: str = ""
    #: how many codes `encode` uses, from 0 on, where they are not all 2**bits (as 0 says); the others
    #: decode to some value too
    codes: int = 0
    #: False: 0 stands for 0 alone, and values near it become the least ones of their sign, as in posits
    rounds_to_zero: bool = True
    #: False: no code stands for 0, so that a block of zeros gets the least scale there is
    has_zero: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind not in DTYPE_KINDS:
            raise ConfigError(
                f"kind={self.kind!r} of number format {self.name!r} is unknown; use one of "
                f"{', '.join(DTYPE_KINDS)}: 'lut' is for values that are neither integers nor floats"
            )
        if self.bits < 1:
            raise ConfigError(f"bits={self.bits}: a code has at least one bit")
        object.__setattr__(self, "codes", self.codes or 1 << self.bits)

    @property
    def has_scale(self) -> bool:
        """Whether tensors in the format have scales; those of a dense format, which needs none, do not."""
        return self.kind != "dense"

    @property
    def code_dtype(self) -> torch.dtype:
        """The torch dtype of codes: uint8, or of a dense format its own."""
        return self.storage if self.kind == "dense" else torch.uint8


class OpCall(Protocol):
    """What selection needs to know of a call of any op: the whole contract of a *call type*.

    A call type is a small frozen dataclass with these four attributes (fields or properties), and with
    whatever else kernels of its ops may look at: shapes, dtypes, formats. It holds no tensors and no values,
    so that selection works while tracing. It must hash, since the selected kernel is remembered by call.
    Kernels know a call type by its attributes alone: a package need not import the one that defines it.
    """

    @property
    def op(self) -> str:
        """Name of the op."""

    @property
    def layout(self) -> str:
        """Kernels registered for this layout are considered, and those for "*"."""

    @property
    def device(self) -> str:
        """Type of the device, such as "cpu"; chooses kernels as `layout` does."""

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Formats of all quantized operands; a kernel that does not know an option of one must not serve."""


@dataclass(frozen=True)
class Call:
    """A call with one quantized operand, such as the weight of a linear layer; an `OpCall`.

    Calls of conversions have the shape of the dense values as both of their shapes, and their dtype.
    """

    #: "linear", "embedding", …; see `Op`
    op: str
    spec: Spec
    #: shape of the weight as stored, e.g. (N, K)
    weight_shape: tuple[int, ...]
    #: shape and dtype of the activations, or of the dense side of a conversion
    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    device: str

    @property
    def m(self) -> int:
        """Rows of the activations: product of all dimensions but the last."""
        rows = 1
        for size in self.x_shape[:-1]:
            rows *= size
        return rows

    @property
    def layout(self) -> str:
        """That of the quantized operand."""
        return self.spec.layout

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The format of the quantized operand."""
        return (self.spec,)


@dataclass(frozen=True)
class Op:
    """An operation that kernels serve: what it computes, what a call of it looks like, how it is tested.

    Registering an op also registers its reference as the kernel ``reference_<name>``, for every layout and
    device, at the lowest priority. A kernel whose op nobody registered is never selected.
    """

    name: str
    #: the call type, a class as `OpCall` describes it
    call: type
    #: computes the op in plain torch on any device; kernels have its parameters and return what it returns
    reference: Callable[..., Any]
    #: what it computes: shapes, dtypes, what is changed in place. Kernels are held to it
    doc: str
    #: returns the `ao_core.testing.OpTrial` by which `KernelSuite` tests kernels of the op; a function, so
    #: that an op imports no test code. None: the suite cannot test its kernels
    trials: Callable[[], Any] | None = None
    #: converts between dense values and codes, without which nothing works. The reference serves it
    #: under every pin where the pinned band does not, and options for matmuls do not matter to it
    is_conversion: bool = False
    #: kinds of input steps that the reference takes itself, see `Kernel.fuses`
    fuses: tuple[str, ...] = ()
    #: (a kernel's function, a number of input steps) -> the function that takes so many of the first steps of
    #: its weight before it calls the kernel's; None: a kernel of the op must take all steps itself
    after_steps: Callable[[Callable[..., Any], int], Callable[..., Any]] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "doc", cleandoc(self.doc))

    @property
    def signature(self) -> str:
        """The op as a function: "linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor"."""
        return self.name + str(signature(self.reference)).replace("'", "")

    @property
    def reference_kernel(self) -> Kernel:
        """The kernel that is registered with the op."""
        name = f"reference_{self.name}"
        return Kernel(name, self.name, "*", "*", self.reference, -100, fuses=self.fuses)


@dataclass(frozen=True)
class Kernel:
    """One implementation of `op` for one `layout` on one `device`, of which either may be "*": any."""

    #: its name in the registry
    name: str
    op: str
    layout: str
    device: str
    #: same signature as the op, see `Op.reference`
    fn: Callable[..., Any]
    #: band: -100 reference, 0 torch, 50 Triton and C++, 100 CUDA
    priority: int
    #: None, or a sentence that says why it cannot run on this machine; asked once
    unavailable: Callable[[], str | None] = lambda: None
    #: None, or a sentence that says why it cannot serve this call, which is of the op's call type
    refuses: Callable[[Any], str | None] = lambda call: None
    #: how it serves a call that it accepts, in a few words for `explain`; may be empty
    describe: Callable[[Any], str] = lambda call: ""
    #: names of the options of a `Spec` that it goes by, besides those that ao-core and the layout read: a
    #: matmul with a weight that has any other option is not its to serve
    options: tuple[str, ...] = ()
    #: kinds of input steps (see `ao_core.steps`) that it takes itself: it gets x and w with such steps in
    #: `w.spec.input`, where they are the last ones. All others are taken before it, or it is not asked
    fuses: tuple[str, ...] = ()
    #: for kernels that know the batch-invariant mode: called with 1 when it begins and -1 when it ends, and
    #: in between a row gets the same bits in any batch. None: in the mode it gets rows one by one
    alone: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_kinds(self.fuses, "fuses")


@dataclass(frozen=True)
class ScaleMethod:
    """A way to choose scales and zero points, whatever the number format and the layout."""

    #: its name in the registry, which `quantize_tensor(..., scale_method=…)` refers to
    name: str
    #: (x of the layout's blocked shape, its format, the spec) -> scale and zero point, or None, of every
    #: block, in the shape and storage of `numerics.choose_qparams`; None: the kernels of the op
    #: "quantize" choose, by the largest magnitude. Where the spec has a nested one for scales, the
    #: scale comes in float32.
    choose: Callable[[Tensor, DType, Spec], tuple[Tensor, Tensor | None]] | None
    summary: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Target:
    """The parameter that a transform is asked to change."""

    #: fully qualified name, e.g. "encoder.layers.0.linear1.weight"
    fqn: str
    #: the module that owns it and the parameter's name there
    module: torch.nn.Module
    name: str

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Skip:
    """A transform's answer when it does not change a parameter, with the reason for the report."""

    reason: str
    #: it could, but the configuration wants it to stay: no failure, so `strict` does not mind
    kept: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Transform:
    """What `quantize_` does for one class of configuration."""

    #: the class of configuration, exactly: none of its subclasses
    config_type: type[Config]
    #: the lowercase name, which is also a recipe name: "int4_weight_only"
    name: str
    version: int
    #: (dense parameter, config, target) -> the tensor that replaces it, or `Skip(reason)`
    apply: Callable[[Tensor, Any, Target], Tensor | Skip]
    #: for the suites: a configuration that can be applied, where the one by default waits for data
    example: Config | None = None
    #: whether it looks at the values of a parameter; else it takes one on the meta device too
    needs_values: bool = True
    #: the configuration that an output head, or an embedding tied to one, gets in place of this one unless
    #: it is named; None: this one. Few bits cost a head more than they cost any other layer
    for_head: Callable[[Any], Config | None] = lambda config: None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Solved:
    """What an algorithm found for one weight."""

    #: its new values: dense, of the shape (E, out, in) that the algorithm got, or a `QTensor` of the
    #: parameter's own shape; None: as they were
    values: Tensor | None = None
    #: what is then applied to dense values; None: they stay dense. Of a `QTensor`, what it is compared with:
    #: this configuration by rounding to nearest
    config: Config | None = None
    #: why it is another configuration than the one that was asked for; else empty
    reason: str = ""
    #: share of the mean of the Hessian's diagonal that was added to it; None: there is nothing to say
    damping: float | None = None
    #: what is not as it would be with more data; else empty
    note: str = ""
    #: the loss that was minimized, before and after; None: there is none
    loss: tuple[float, float] | None = None
    #: what is added to the bias of the weight's module, one number for each of its outputs; None: nothing
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Algorithm:
    """What `quantize_(model, config, data=batches)` does for one class of configuration that needs data."""

    #: the lowercase name, which is also a recipe name
    name: str
    #: the class of configuration, exactly: none of its subclasses
    config_type: type[Config]
    #: configuration -> what it needs of the inputs of a weight; empty: this one needs no data
    needs: Callable[[Any], tuple[Statistic, ...]]
    #: (weight (E, out, in), statistics of the inputs of each of the E matrices, configuration, target) ->
    #: what was found, or why nothing can be. A pure function. E is the number of experts, or of groups of
    #: channels of a convolution, whose filters are unfolded; else 1. An algorithm for one matrix takes them
    #: in turn. The target is the parameter, for those that quantize it themselves.
    solve: Callable[[Tensor, tuple[Statistics, ...], Any, Target], Solved | Skip]
    #: True: inputs are made by the weights before as they were rewritten, weight by weight; False: by the
    #: model as it is, in one run for all weights
    sequential: bool = True
    #: (block, its weights that are to be solved for) -> by name, what was found for each: for algorithms that
    #: solve for all weights of a block at once, with its outputs in view. Where the model has no blocks that
    #: can be run one by one, and for weights in none, `solve` is called. None: it always is
    solve_block: Callable[[Block, Sequence[BlockWeight]], Mapping[str, Solved | Skip]] | None = None
    #: (the weight on the meta device, configuration, target) -> None, or why it cannot be solved for; asked
    #: before any data is run
    refuses: Callable[[Tensor, Any, Target], str | None] = lambda weight, config, target: None
    #: for the suites: a configuration that needs data, where the class cannot be called without arguments
    example: Config | None = None
    #: what a head gets in place of a configuration; see `Transform.for_head`
    for_head: Callable[[Any], Config | None] = lambda config: None
    #: configuration -> one whose format the result has, where that is known before; `plan_checkpoint` tells
    #: sizes by it
    becomes: Callable[[Any], Config | None] = lambda config: None
    #: called with what was found for all weights, by name; to warn
    after: Callable[[dict[str, Solved]], None] = lambda found: None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Recipe:
    """A named, ready configuration, e.g. "float8/rowwise"."""

    #: the name that `quantize_` and files refer to
    name: str
    #: what it stands for
    config: Config
    #: one line, for `ao formats`
    summary: str = ""
    #: a short name of its format, in names of stacks: "int4-g128" in "gptq/int4-g128"; empty: none
    short: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
