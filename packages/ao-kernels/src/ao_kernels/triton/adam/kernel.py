"""A step of Adam over many tensors, with moments in 8 bits; see `ao_kernels.triton.adam.op`."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["seed"])
def step(
    tensor_ptr,
    chunk_ptr,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    rate,
    root,
    keep,
    decay,
    sign,
    seed,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    ASM: tl.constexpr,
    ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """One block for a chunk of CHUNK elements of one tensor, ROWS × 256 of them at a time.

    `tensor_ptr` int64 (tensors, 7): the addresses of parameter, gradient, codes and scales of both
    moments, and the number of elements. `rest1` and `rest2` are 1 less the betas. `chunk_ptr`
    int32 (chunks, 2): tensor, number of the chunk in it. Moments are floats where FIRST, the elements of the
    first one, is float8e4nv, and companded where it is uint8.
    """
    tensor = tl.load(chunk_ptr + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(chunk_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    at = tensor_ptr + 7 * tensor
    size = tl.load(at + 6)
    p_ptr = _pointer(at, PARAM, ALIGNED)
    g_ptr = _pointer(at + 1, GRAD, ALIGNED)
    m_ptr = _pointer(at + 2, FIRST, ALIGNED)
    m_scale_ptr = _pointer(at + 3, tl.float32, False)
    v_ptr = _pointer(at + 4, tl.uint8, ALIGNED)
    v_scale_ptr = _pointer(at + 5, tl.float32, False)

    STEP: tl.constexpr = ROWS * 256
    ZERO: tl.constexpr = 127 if tl.uint8 == FIRST else 0.0
    last = tl.minimum(first + CHUNK, size)
    whole = first + (last - first) // STEP * STEP
    rows = tl.arange(0, ROWS)
    # each thread has as many neighbours of every tensor as 16 bytes hold of the widest, and a warp a row
    within = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    within = tl.max_contiguous(tl.multiple_of(within, [1, VECTOR]), [1, VECTOR])
    for start in range(first, whole, STEP):
        p, m, m_scale, v, v_scale = _update(
            tl.load(p_ptr + start + within),
            tl.load(g_ptr + start + within),
            tl.load(m_ptr + start + within),
            tl.load(m_scale_ptr + start // 256 + rows),
            tl.load(v_ptr + start + within),
            tl.load(v_scale_ptr + start // 256 + rows),
            beta1, beta2, rest1, rest2, eps, rate, root, keep, decay, sign, ASM,
        )  # fmt: skip
        random = _random(
            seed, tl.program_id(0).to(tl.int64) * CHUNK + start - first, ROWS, STOCHASTIC
        )
        tl.store(p_ptr + start + within, _rounded(p, random, PARAM, STOCHASTIC))
        tl.store(m_ptr + start + within, m)
        tl.store(v_ptr + start + within, v)
        tl.store(m_scale_ptr + start // 256 + rows, m_scale)
        tl.store(v_scale_ptr + start // 256 + rows, v_scale)
    if whole < last:
        inside = whole + within < last
        row_inside = whole + rows * 256 < last
        p, m, m_scale, v, v_scale = _update(
            tl.load(p_ptr + whole + within, mask=inside, other=0.0),
            tl.load(g_ptr + whole + within, mask=inside, other=0.0),
            tl.load(m_ptr + whole + within, mask=inside, other=ZERO),
            tl.load(m_scale_ptr + whole // 256 + rows, mask=row_inside, other=0.0),
            tl.load(v_ptr + whole + within, mask=inside, other=0),
            tl.load(v_scale_ptr + whole // 256 + rows, mask=row_inside, other=0.0),
            beta1, beta2, rest1, rest2, eps, rate, root, keep, decay, sign, ASM,
        )  # fmt: skip
        random = _random(
            seed, tl.program_id(0).to(tl.int64) * CHUNK + whole - first, ROWS, STOCHASTIC
        )
        tl.store(p_ptr + whole + within, _rounded(p, random, PARAM, STOCHASTIC), mask=inside)
        tl.store(m_ptr + whole + within, m, mask=inside)
        tl.store(v_ptr + whole + within, v, mask=inside)
        tl.store(m_scale_ptr + whole // 256 + rows, m_scale, mask=row_inside)
        tl.store(v_scale_ptr + whole // 256 + rows, v_scale, mask=row_inside)


@triton.jit
def _pointer(at, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(at).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _update(
    p,
    g,
    m_code,
    m_scale,
    v_code,
    v_scale,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    rate,
    root,
    keep,
    decay,
    sign,
    ASM,
):
    """New parameters in float32, and codes and scales of both moments."""
    p = p.to(tl.float32)
    g = g.to(tl.float32) * sign + decay * p
    COMPANDED: tl.constexpr = m_code.dtype == tl.uint8
    old_m = _companded(m_code) if COMPANDED else m_code.to(tl.float32)
    old_v = _companded_squares(v_code) if COMPANDED else _squares(v_code)
    m = old_m * (m_scale * beta1)[:, None] + rest1 * g
    v = old_v * (v_scale * beta2)[:, None] + rest2 * g * g
    p = p * keep - rate * (m * _reciprocal(_root(v, ASM) * root + eps, ASM))
    if COMPANDED:
        m, m_scale = _compand(m, ASM)
        v, v_scale = _compand_squares(v, ASM)
    else:
        m, m_scale = _encode(m, ASM)
        v, v_scale = _encode_squares(v, ASM)
    return p, m, m_scale, v, v_scale


@triton.jit
def _root(x, ASM: tl.constexpr):
    if ASM:
        root = tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        root = tl.sqrt(x)
    return root


@triton.jit
def _reciprocal(x, ASM: tl.constexpr):
    if ASM:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _encode(x, ASM: tl.constexpr):
    """Codes, and a scale for each row, which its largest magnitude is 448 times; of zeros 0."""
    absmax = tl.reduce(tl.abs(x), 1, _greater)
    # below 448 / the greatest float32 the reciprocal would be infinite: codes are 0 then
    small = absmax < 2e-36
    inverse = tl.where(small, 0.0, 448.0 * _reciprocal(tl.where(small, 1.0, absmax), ASM))
    x *= inverse[:, None]
    if not ASM:
        x = _on_grid(x)
    return x.to(tl.float8e4nv), absmax * (1.0 / 448.0)


@triton.jit
def _squares(code):
    """f8e5m3u: the bits 20 to 27 of a float32, whose exponent of 5 bits begins at 2**-31."""
    return ((code.to(tl.int32) << 20) | 0x30000000).to(tl.float32, bitcast=True)


@triton.jit
def _encode_squares(x, ASM: tl.constexpr):
    """Codes in f8e5m3u, and a scale for each row, which its largest number is 1.875 times."""
    # 2**-126 is the least scale, and has a reciprocal
    scale = _greater(tl.reduce(x, 1, _greater) * (1.0 / 1.875), 1.1754943508222875e-38)
    bits = (x * _reciprocal(scale, ASM)[:, None]).to(tl.int32, bitcast=True)
    code = ((bits + 0x7FFFF) >> 20) - 0x300
    return tl.maximum(code, 0).to(tl.uint8), scale


@triton.jit
def _integer(code):
    """2**23 + code: its bits are the mantissa's last, without a conversion."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _companded(code):
    """±(i / 127)², where a code is 127 ± i."""
    x = (_integer(code) - 8388735.0) * (1.0 / 127.0)
    return x * tl.abs(x)


@triton.jit
def _companded_squares(code):
    """(code / 255)⁴."""
    x = (_integer(code) - 8388608.0) * (1.0 / 255.0)
    x *= x
    return x * x


@triton.jit
def _companded_scale(absmax):
    """The largest number of each row: 2**-126 at least, which has a reciprocal; of zeros 1."""
    return tl.where(absmax == 0.0, 1.0, _greater(absmax, 1.1754943508222875e-38))


@triton.jit
def _compand(x, ASM: tl.constexpr):
    """Codes of `_companded`. Halfway between i² and (i + 1)² lies (i + 1/2)² + 1/4."""
    scale = _companded_scale(tl.reduce(tl.abs(x), 1, _greater))
    x *= _reciprocal(scale, ASM)[:, None]
    size = _root(tl.maximum(tl.abs(x) * 16129.0 - 0.25, 0.0), ASM)
    signed = (size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(
        tl.float32, bitcast=True
    )
    # floats near 1.5 * 2**23 are integers, so the sum is rounded; then 127 is added
    code = (signed + 12582912.0).to(tl.int32, bitcast=True) + 127
    return code.to(tl.uint8), scale


@triton.jit
def _compand_squares(x, ASM: tl.constexpr):
    """Codes of `_companded_squares`. Halfway between i⁴ and (i + 1)⁴ lies ((i + 1/2)² + 3/4)² - 1/2."""
    scale = _companded_scale(tl.reduce(x, 1, _greater))
    x *= _reciprocal(scale, ASM)[:, None]
    square = _root(x * 4228250625.0 + 0.5, ASM)
    code = _root(tl.maximum(square - 0.75, 0.0), ASM) + 8388608.0
    return code.to(tl.int32, bitcast=True).to(tl.uint8), scale


@triton.jit
def _on_grid(x):
    """What e4m3 holds, nearest to x: Triton 3.6's interpreter does not carry into the exponent."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = bits.to(tl.float32, bitcast=True)
    # below 2**-6 steps are 2**-9: those that 1.5 * 2**14 has beside it
    rounded = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
    return tl.where(x == x, rounded, x)


@triton.jit
def _random(seed, place, ROWS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """ROWS × 256 random words, from `place` on in their sequence: four of each call of the generator."""
    words = 0
    if STOCHASTIC:
        fours = tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :]
        a, b, c, d = tl.randint4x(seed, place // 4 + fours)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, 256))
    return words


@triton.jit
def _rounded(x, random, ELEMENT: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC and tl.bfloat16 == ELEMENT:
        bits = x.to(tl.int32, bitcast=True)
        up = (bits + (random.to(tl.int32) & 0xFFFF)) & -0x10000
        finite = (bits & 0x7F800000) != 0x7F800000
        x = tl.where(finite, up, bits).to(tl.float32, bitcast=True)
    return x.to(ELEMENT)
