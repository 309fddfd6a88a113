"""The ops of ao-core: what each computes, its reference, and how its kernels are tested.

In their texts `w` is a `QTensor`, M, N and K are the sizes of a matmul, and E is the number of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ao_core.invariant import DenseCall, dense_linear
from ao_core.records import Call, Op
from ao_core.scales import search
from ao_core.steps import ROW_STEPS, STEP_KINDS
from ao_core.tensor.attention import AttendCall
from ao_core.tensor.blocks import BlockCall
from ao_core.tensor.codec import decode_reference
from ao_core.tensor.decoder import DecoderCall
from ao_core.tensor.encoding import fake_quantize_reference
from ao_core.tensor.scaled import quantize_scaled_reference
from ao_core.tensor.step_matmuls import grouped_linear_after_steps, linear_after_steps
from ao_core.tensor.tail import EncodeTokensCall, WriteTailCall
from ao_core.torch_kernels import (
    attend,
    blocks,
    decoder,
    fused_quant,
    learned,
    reference,
    rotation,
    sums,
    tail,
)

__all__ = ["BUILTIN_OPS"]


def _trials(module: str, name: str) -> Callable[[], Any]:
    """The trials of that name in a module of `ao_core.testing`, which is imported when they are asked for."""
    return lambda: getattr(import_module(f"ao_core.testing.{module}"), name)


_LINEAR = Op(
    "linear",
    Call,
    reference.linear,
    """`y = x @ w.T + bias`. x is (..., K), w (N, K), bias (N,) or None; y is (..., N) in the dtype of x.""",
    _trials("kernel_ops", "LINEAR"),
    after_steps=linear_after_steps,
)

_DENSE_LINEAR = Op(
    "dense_linear",
    DenseCall,
    dense_linear,
    """`y = x @ weight.T + bias` in the batch-invariant mode, of dense tensors of one dtype.

    x is (..., K), weight (N, K), bias (N,) or None; y is (..., N). A row of y depends on no other row of x.
    """,
    _trials("kernel_dense", "DENSE_LINEAR"),
)

_EMBEDDING = Op(
    "embedding",
    Call,
    reference.embedding,
    """`y = w[ids]`. ids are integers (...), w is (N, K); y is (..., K) in the dtype of w.

    `Call.x_shape` is the shape of ids.
    """,
    _trials("kernel_ops", "EMBEDDING"),
    # `dequantize` undoes input steps, so what only reads logical values takes them all
    fuses=STEP_KINDS,
)

_GROUPED_LINEAR = Op(
    "grouped_linear",
    Call,
    reference.grouped_linear,
    """The matmul of each expert with its own rows. w is (E, N, K).

    Either x is (M, K) with rows sorted by expert, and offs, int32 (E,), has the row after each expert's last:
    y is (M, N) in the dtype of x, with zeros from row offs[-1] on. Or x is (E, M, K) and offs is None: y is
    (E, M, N).
    """,
    _trials("kernel_ops", "GROUPED_LINEAR"),
    after_steps=grouped_linear_after_steps,
)

_MM = Op(
    "mm",
    Call,
    reference.mm,
    """`y = a @ b.T` of dense operands that are quantized for this matmul, for `ComputeWeight`.

    a is (M, K), b (N, K); y is (M, N) in the dtype of a. b is quantized as `spec` says and a as `spec.act`.
    Either may be quantized already: a `QTensor` in the layout "plain".
    """,
    _trials("kernel_ops", "MM"),
)

_GROUPED_MM = Op(
    "grouped_mm",
    Call,
    reference.grouped_mm,
    """`mm` of each expert, whose operands are quantized by themselves.

    - a (M, K) with rows sorted by expert, b (E, N, K): y is (M, N), with zeros from row offs[-1] on
    - a (N, M), b (K, M), where offs cuts the contracted dimension: y is (E, N, K)
    - a (E, M, K), b (E, N, K), offs None: y is (E, M, N)
    """,
    _trials("kernel_ops", "GROUPED_MM"),
)

_ATTEND = Op(
    "attend",
    AttendCall,
    attend.attend,
    """Attention of the last T tokens over a cache of quantized keys and values, and a dense tail.

    q is (B, Hq, T, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv); the result is (B, Hq, T, Dv), in the dtype
    of q. `ao_core.ext.attend`, which calls it, says what the arguments are and what each query sees. Sums
    are in float32 at least. Memory of no token, beyond `counts`, may hold anything, NaN too.
    """,
    _trials("kernel_attend", "ATTEND"),
    # tiles are dequantized, which undoes the steps
    fuses=ROW_STEPS,
)

_WRITE_TAIL = Op(
    "write_tail",
    WriteTailCall,
    tail.write_tail,
    """Write the last T tokens of a cache of keys and values into its tail, in place, and set its counts.

    key is (B, Hkv, T, D), value (B, Hkv, T, Dv), with any strides; the tails are (B, Hkv, R, ·), contiguous.
    Token p goes to slot p % R; the first `coded` ones, or `counts[1]`, are left out.
    `ao_core.ext.kernels.write_tail`, which calls it, says what the arguments are.
    """,
    _trials("kernel_tail", "WRITE_TAIL"),
)

_ENCODE_TOKENS = Op(
    "encode_tokens",
    EncodeTokensCall,
    tail.encode_tokens,
    """Quantize tokens `begin` to `end` of a cache of keys and values in place, from their exact values.

    Of blocks that begin there, what `quantize` makes of them; of one that was begun before, codes by its
    scales. `ao_core.ext.kernels.encode_tokens`, which calls it, says what the arguments are.
    """,
    _trials("kernel_tail", "ENCODE_TOKENS"),
    is_conversion=True,
    # tokens are rotated before they are quantized
    fuses=ROW_STEPS,
)

_QKV = Op(
    "qkv",
    BlockCall,
    blocks.qkv,
    """Queries, keys and values of a decoder block: norm, one matmul, heads, rotary embedding.

    x is (B, T, K), the weight ((Hq + 2 Hkv) D, K): rows of queries, of keys, of values. The tables `cosine`
    and `sine` are (B or 1, T, R), R ≤ D, in the dtype of x. The results are (B, Hq, T, D) and twice
    (B, Hkv, T, D). What models write down is rounded to the dtype of x.
    """,
    _trials("kernel_blocks", "QKV"),
)

_MLP = Op(
    "mlp",
    BlockCall,
    blocks.mlp,
    """A decoder block after attention: `h = residual + output(x)`, then `h + down(gate(g) * u)`.

    g and u are the halves of gate_up(norm(h)). x is (..., K). Without `output`, x itself is added; without
    `residual`, nothing is added at either place, which leaves the MLP. What models write down is rounded
    to the dtype of x.
    """,
    _trials("kernel_blocks", "MLP"),
)

_DECODER = Op(
    "decoder",
    DecoderCall,
    decoder.decoder,
    """Consecutive decoder blocks for the next T tokens, over the caches of their attention.

    Each is what `qkv`, `write_tail`, `attend` and `mlp` make of the block before it, with the same rounding;
    the tails and the counts of the caches are written. x is (B, T, K); the first result,
    (blocks, B, T, K), is what each block returns. The second, (B, T, N), are the logits of the head, a norm
    and a linear layer; N is 0 where there is none. No block of tokens is quantized: the tails have room for
    T tokens.
    `ao_core.ext.kernels.CachedBlocks`, which calls it, says what the arguments are.
    """,
    _trials("kernel_decoder", "DECODER"),
    # its parts take them
    fuses=ROW_STEPS,
)

_QUANTIZE = Op(
    "quantize",
    Call,
    reference.quantize,
    """The parts of a dense tensor. x is floating-point of at least one dimension, finite or not.

    `spec` is in a canonical layout. Scales and zero points are those of `choose_qparams`. Every kernel gives
    the bits of the reference.
    """,
    _trials("kernel_codecs", "QUANTIZE"),
    is_conversion=True,
)

_QUANTIZE_SCALED = Op(
    "quantize_scaled",
    Call,
    quantize_scaled_reference,
    """The parts of a dense tensor by scales and zero points that there are, which become parts as they are.

    `spec` is in a canonical layout, with scales that are stored plainly. `scale` and `zero_point` are numbers
    of any dtype, in the shape of `choose_qparams`; zero points are in the domain of codes, or codes (uint8).
    Every kernel gives the bits of the reference.
    """,
    _trials("kernel_codecs", "QUANTIZE_SCALED"),
    is_conversion=True,
)

_QUANTIZE_BOTH = Op(
    "quantize_both",
    Call,
    reference.quantize_both,
    """The parts of a matrix x and those of its transpose, each as `quantize` gives them.""",
    _trials("kernel_codecs", "QUANTIZE_BOTH"),
    is_conversion=True,
)

_RMS_NORM_QUANTIZE = Op(
    "rms_norm_quantize",
    Call,
    fused_quant.rms_norm_quantize,
    """The parts of `RMSNorm(x)` over the last dimension. x is (..., K), weight (K,) or None.

    See `ao_core.compute.fused_quant`.
    """,
    _trials("kernel_codecs", "RMS_NORM"),
    is_conversion=True,
)

_SILU_MUL_QUANTIZE = Op(
    "silu_mul_quantize",
    Call,
    fused_quant.silu_mul_quantize,
    """The parts of `silu(gate) * up`, both (..., K). See `ao_core.compute.fused_quant`.""",
    _trials("kernel_codecs", "SILU_MUL"),
    is_conversion=True,
)

_HADAMARD = Op(
    "hadamard",
    Call,
    rotation.hadamard,
    """The Hadamard transform of every `block` elements of the last dimension. x is (..., K), y as x.

    As `ao_core.numerics.hadamard_transform` has it, or with `inverse` `inverse_hadamard_transform`. The
    spec of the `Call` is a dense one with the block (1, `block`), see `ao_core.tensor.rotation`.
    """,
    _trials("kernel_rotation", "HADAMARD"),
    is_conversion=True,
)

_DEQUANTIZE = Op(
    "dequantize",
    Call,
    decode_reference,
    """The values of `parts`, in the stored `shape` and in `out_dtype`.

    `(decode(code) - zero_point) * scale` in float32, or what `Spec` says, rounded once. Every kernel gives
    the bits of the reference.
    """,
    _trials("kernel_codecs", "DEQUANTIZE"),
    is_conversion=True,
)

_FAKE_QUANTIZE = Op(
    "fake_quantize",
    Call,
    fake_quantize_reference,
    """What `dequantize` gives for the parts of `quantize`, in the shape and dtype of x.

    It is contiguous, or lies in memory as x does: where `x.t()` is contiguous, so may be that of the result.
    """,
    _trials("kernel_codecs", "FAKE_QUANTIZE"),
    is_conversion=True,
)

_ERROR_SUMS = Op(
    "error_sums",
    Call,
    reference.sums_of_rows,
    """Two sums in float64, (2,): of `x**2` and of `(x - w.dequantize())**2`, over every `step`-th row.

    Rows are those of dimension 0. The report of `quantize_` is made of them.
    """,
    _trials("kernel_codecs", "ERROR_SUMS"),
    is_conversion=True,
    fuses=STEP_KINDS,
)

_SCALE_SUMS = Op(
    "scale_sums",
    Call,
    sums.scale_sums,
    """Sums of the errors that rows would have with each of several scales: what searches for scales go by.

    x is (B, E); scale, as stored but in float32, and zero_point, in the domain of codes, are (B, C), and
    importance is (B, E) in float32. With the error e = (v - zero_point) * scale - x of an element and its
    importance w, 1 without any, the result (3, B, C), float32, has the sums of w e², w e x and w e; with a
    power, above 0 and at most 2, a fourth is that of w |e|**power. v is the value of the format `spec.dtype`
    that is nearest to x / scale + zero_point in float32, as `quantize` has it; with more than 4
    candidates it may be the other one near a tie. A scale of 0 makes all values 0.
    """,
    _trials("kernel_sums", "SCALE_SUMS"),
    is_conversion=True,
)

_SEARCH_SCALES = Op(
    "search_scales",
    Call,
    search.search_scales,
    """Scales and zero points of least measure among many, of each row: `mse`, `hqq`, searches by importance.

    x is (B, E); scale, as stored but in float32, and zero_point, in the domain of codes, are (B, 1), where
    the search starts; importance is (B, E) in float32. A `SearchPlan` says what is tried: of each row the
    ends of the best range so far, times factors, rounded to what `spec` stores, then fits of least squares.
    The results are (B, 1): scales and zero points, or None, of the least measure, see
    `ao_core.scales.rows.measured`, among those whose squared error is not above that of the start, and
    whether both are less without doubt (bool). With a power, errors are measured in units of the start's
    scales, cut to powers of two. Near a tie a kernel may find another one.
    """,
    _trials("kernel_search", "SEARCH_SCALES"),
    is_conversion=True,
)

_LEARNED_GRADIENTS = Op(
    "learned_gradients",
    Call,
    learned.learned_gradients_reference,
    """The gradients of rounding x by scales that are learned, given that of what dequantizing gives.

    x and grad have one shape; scale, as stored but in float32 and not 0, and zero_point, in the domain of
    codes, are float32 grids of `spec.block`. Dtype and block of `spec` count. With place = x / scale +
    zero_point and v the value of the format that is nearest to it, an element is outside where its place is
    further than `reach` beyond the format's range. The first result, in shape and dtype of grad, is grad, and
    0 outside. The second, float32 (2, *grid), has the sums over each block of grad · (v - place), or outside
    grad · v, and of the gradients outside.
    """,
    _trials("kernel_learned", "LEARNED_GRADIENTS"),
    is_conversion=True,
)

#: in the order of the documentation
BUILTIN_OPS = (
    _LINEAR,
    _DENSE_LINEAR,
    _EMBEDDING,
    _GROUPED_LINEAR,
    _MM,
    _GROUPED_MM,
    _ATTEND,
    _WRITE_TAIL,
    _ENCODE_TOKENS,
    _QKV,
    _MLP,
    _DECODER,
    _QUANTIZE,
    _QUANTIZE_SCALED,
    _QUANTIZE_BOTH,
    _RMS_NORM_QUANTIZE,
    _SILU_MUL_QUANTIZE,
    _HADAMARD,
    _DEQUANTIZE,
    _FAKE_QUANTIZE,
    _ERROR_SUMS,
    _SCALE_SUMS,
    _SEARCH_SCALES,
    _LEARNED_GRADIENTS,
)
