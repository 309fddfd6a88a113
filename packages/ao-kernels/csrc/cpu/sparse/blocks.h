// The matmul of a row of stored blocks, which are decoded first where instructions do not take them.
#pragma once
#include "../linear/product.h"
#include "kernels.h"

namespace ao::AO_ISA {

// -- decoding ---------------------------------------------------------------------------------------------

template <int kByte>
AO_INLINE F signed_byte(I bytes) {
  return to_float(shift_right<24>(shift_left<24 - 8 * kByte>(bytes)));
}

// `count` vectors of 16 lanes, those of a lane's values that stand together, as floats: (column, lane), with
// `lanes` lanes in a block.
static void decode_floats(ValueType type, const uint8_t* from, int64_t count, int64_t lanes, float* to) {
  const int64_t across = lanes / 16;  // vectors of a column
  for (int64_t i = 0; i < count; ++i, from += 16 * together_of(type) * bytes_of(type)) {
    float* out = to + i / across * together_of(type) * lanes + i % across * 16;
    if (type == ValueType::f16) {
      store(out, half_to_float(reinterpret_cast<const uint16_t*>(from)));
      continue;
    }
    const I all = load_vector(from);
    if (type == ValueType::bf16) {
      store(out, as_float(shift_left<16>(all)));
      store(out + lanes, as_float(and_(all, splat_int(static_cast<int32_t>(0xffff0000)))));
    } else {
      const I bytes = xor_(all, splat_int(static_cast<int32_t>(0x80808080)));
      store(out, signed_byte<0>(bytes));
      store(out + lanes, signed_byte<1>(bytes));
      store(out + 2 * lanes, signed_byte<2>(bytes));
      store(out + 3 * lanes, signed_byte<3>(bytes));
    }
  }
}

#if AO_HAS_PAIRS
// Signed bytes, which bfloat16 holds exactly, as pairs of it.
static void decode_pairs(const uint8_t* from, int64_t count, int64_t lanes, uint8_t* to) {
  const int64_t across = lanes / 16;
  for (int64_t i = 0; i < count; ++i, from += 64) {
    uint8_t* out = to + (i / across * 2 * lanes + i % across * 16) * 4;
    const I bytes = xor_(load_vector(from), splat_int(static_cast<int32_t>(0x80808080)));
    store_weight(out, pair_rounded(signed_byte<0>(bytes), signed_byte<1>(bytes)));
    store_weight(out + lanes * 4, pair_rounded(signed_byte<2>(bytes), signed_byte<3>(bytes)));
  }
}
#endif

// -- the loop ---------------------------------------------------------------------------------------------

// Some blocks of a row of blocks, ready to be multiplied.
struct Stretch {
  const uint8_t* panel;    // the first block: (columns / together, lane, together)
  const int32_t* columns;  // of blocks
  int64_t count;
  bool first;              // sums begin here
};

// Columns that stand together in a panel.
static constexpr int together_of(Mode mode) { return mode == Mode::f32 ? 1 : mode == Mode::pairs ? 2 : 4; }

// Where the activations of a column of blocks begin, and bytes from one row to the next.
struct BlockActivations {
  const uint8_t* x;
  int64_t stride;
};
AO_INLINE BlockActivations activations_of(const BlockSparse& t, int64_t row, int64_t column) {
  const int64_t width = t.side * bytes_of(t.mode);
  if (column < t.x_direct) {
    const int64_t stride = t.x_stride * bytes_of(t.mode);
    return {static_cast<const uint8_t*>(t.x) + row * stride + column * width, stride};
  }
  const int64_t stride = (t.column_blocks - t.x_direct) * width;
  return {t.x_packed + row * stride + (column - t.x_direct) * width, stride};
}

// kRows rows of activations, from `row` on, times 16 * kColumns lanes of the blocks, from `lane` on.
template <Mode kMode, int kRows, int kColumns>
static void multiply_stretch(const BlockSparse& t, const Stretch& s, int64_t row, int64_t lane, uint8_t* totals) {
  using A = Arithmetic<kMode>;
  typename A::Sum sums[kRows][kColumns];
  const int64_t total_stride = t.side * 4, line = t.side * 4;
  const int64_t units = t.side / together_of(kMode);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      if (s.first) {
        sums[r][c] = A::zero_sum();
      } else {
        load_weight(sums[r][c], totals + r * total_stride + c * 64);
      }
    }
  }
  const uint8_t* w = s.panel + lane * 4;
  BlockActivations source = activations_of(t, row, s.columns[0]);
  for (int64_t i = 0; i < s.count; ++i) {
    const BlockActivations next = i + 1 < s.count ? activations_of(t, row, s.columns[i + 1]) : source;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      for (int64_t b = 0; b < units * 4; b += 64) __builtin_prefetch(next.x + r * next.stride + b);
    }
    const uint8_t* x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) x[r] = source.x + r * source.stride;
    for (int64_t u = 0; u < units; ++u, w += line) {
      typename A::Weight part[kColumns];
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) load_weight(part[c], w + c * 64);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto all = A::spread(x[r] + u * 4);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) sums[r][c] = A::template dot<false>(sums[r][c], part[c], all);
      }
    }
    source = next;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) store_weight(totals + r * total_stride + c * 64, sums[r][c]);
  }
}

using MultiplyStretch = void (*)(const BlockSparse&, const Stretch&, int64_t row, int64_t lane, uint8_t* totals);

template <Mode kMode, int kColumns, int kRows>
static MultiplyStretch stretch_product(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return stretch_product<kMode, kColumns, kRows - 1>(rows);
  }
  return multiply_stretch<kMode, kRows, kColumns>;
}

// Vectors of lanes that are multiplied together, and rows of activations: sums, weights and an activation fill the
// registers.
constexpr int kStretchColumns = kRegisters == 1 ? 4 : 1;
constexpr int stretch_rows(int columns) { return columns == 4 ? 6 : kRegisters == 1 ? 8 : kPanelRows; }

// All rows of activations times lanes from `lane` on, as many at a time as the registers hold.
template <Mode kMode, int kColumns = kStretchColumns>
static void multiply_lanes(const BlockSparse& t, const Stretch& s, Rows rows, int64_t lane, uint8_t* totals) {
  if constexpr (kColumns > 1) {
    if (lane + kColumns * 16 > t.side) return multiply_lanes<kMode, kColumns / 2>(t, s, rows, lane, totals);
  }
  constexpr int kRows = stretch_rows(kColumns);
  const int64_t all = rows.end - rows.begin, tiles = (all + kRows - 1) / kRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const Rows part = rows_of(all, tiles, i);
    const MultiplyStretch multiply = stretch_product<kMode, kColumns, kRows>(part.end - part.begin);
    multiply(t, s, rows.begin + part.begin, lane, totals + (part.begin * t.side + lane) * 4);
  }
  const int64_t next = lane + kColumns * 16;
  if (next < t.side) multiply_lanes<kMode>(t, s, rows, next, totals);
}

// -- a row of blocks ----------------------------------------------------------------------------------------

// Bytes of a panel that stay in L1 beside activations and sums.
constexpr int64_t kStretchBytes = 16 << 10;

static int64_t panel_bytes(const BlockSparse& t) { return t.side * t.side * 4 / together_of(t.mode); }
static bool decodes(const BlockSparse& t) {
  if (t.mode == Mode::f32) return t.value != ValueType::f32;
  return t.mode == Mode::pairs && t.value != ValueType::bf16;
}
static int64_t stretch_of(const BlockSparse& t) {
  const int64_t fitting = kStretchBytes / panel_bytes(t);
  return fitting < 1 ? 1 : fitting;
}

static int64_t blocks_scratch(const BlockSparse& t, int64_t rows) {
  return rows * t.side * 4 + (decodes(t) ? stretch_of(t) * panel_bytes(t) : 0);
}

static const uint8_t* panel_of(const BlockSparse& t, int64_t first, int64_t count, uint8_t* scratch) {
  const uint8_t* stored = t.blocks + first * t.side * t.side * bytes_of(t.value);
  if (!decodes(t)) return stored;
  const int64_t vectors = t.side * t.side / together_of(t.value) / 16;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* block = stored + i * t.side * t.side * bytes_of(t.value);
    uint8_t* to = scratch + i * panel_bytes(t);
#if AO_HAS_PAIRS
    if (t.mode == Mode::pairs) {
      decode_pairs(block, vectors, t.side, to);
      continue;
    }
#endif
    decode_floats(t.value, block, vectors, t.side, reinterpret_cast<float*>(to));
  }
  return scratch;
}

// Scales, bias, and the dtype of the output.
static void write_blocks(const BlockSparse& t, int64_t row_block, Rows rows, const uint8_t* totals) {
  const int size = bytes_of(t.type);
  for (int64_t lane = 0; lane < t.side; lane += 16) {
    const int64_t column = row_block * t.side + lane;
    if (column >= t.n) return;
    const int count = t.n - column < 16 ? static_cast<int>(t.n - column) : 16;
    const F bias = t.bias ? load_as(t.type, static_cast<const uint8_t*>(t.bias) + column * size, count) : zero();
    F scale = splat(1.0f);
    if (t.scale) {
      const auto* from = static_cast<const uint8_t*>(t.scale);
      scale = t.scale_of_rows ? load_as(t.scale_type, from + column * bytes_of(t.scale_type), count)
                              : splat(sum(load_as(t.scale_type, from, 1)));
    }
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const uint8_t* sums = totals + ((r - rows.begin) * t.side + lane) * 4;
      F v;
      if (t.mode == Mode::int8) {
        // codes are stored 128 too large
        int32_t excess = 0;
        for (int32_t i = t.starts[row_block]; i < t.starts[row_block + 1]; ++i) {
          excess += t.x_sums[r * t.column_blocks + t.columns[i]];
        }
        v = to_float(subtract(load_vector(sums), splat_int(128 * excess)));
      } else {
        v = load(reinterpret_cast<const float*>(sums));
      }
      // in this order, so that a large scale of activations does not lead beyond what a small one brings back
      if (t.scale) v = mul(v, scale);
      if (t.x_scale) v = mul(v, splat(t.x_scale[r]));
      if (t.bias) v = add(v, bias);
      store_as(t.type, static_cast<uint8_t*>(t.y) + (r * t.n + column) * size, v, count);
    }
  }
}

template <Mode kMode>
static void multiply_blocks(const BlockSparse& t, int64_t row_block, Rows rows, uint8_t* totals, uint8_t* panel) {
  const int64_t begin = t.starts[row_block], end = t.starts[row_block + 1];
  // where one pass over the weights makes the whole matmul, sums stay in the registers
  const bool once = !decodes(t) && rows.end - rows.begin <= stretch_rows(kStretchColumns);
  const int64_t most = once ? end - begin : stretch_of(t);
  for (int64_t first = begin; first < end; first += most) {
    const int64_t count = end - first < most ? end - first : most;
    const Stretch s{panel_of(t, first, count, panel), t.columns + first, count, first == begin};
    multiply_lanes<kMode>(t, s, rows, 0, totals);
  }
}

static void blocks_of(const BlockSparse& t, int64_t row_block, Rows rows, uint8_t* scratch) {
  uint8_t* panel = scratch + (rows.end - rows.begin) * t.side * 4;
  if (t.starts[row_block] == t.starts[row_block + 1]) {
    __builtin_memset(scratch, 0, static_cast<size_t>(panel - scratch));
  }
  switch (t.mode) {
    case Mode::f32: multiply_blocks<Mode::f32>(t, row_block, rows, scratch, panel); break;
    case Mode::int8: multiply_blocks<Mode::int8>(t, row_block, rows, scratch, panel); break;
#if AO_HAS_PAIRS
    case Mode::pairs: multiply_blocks<Mode::pairs>(t, row_block, rows, scratch, panel); break;
#endif
    default: break;
  }
  write_blocks(t, row_block, rows, scratch);
}

}  // namespace ao::AO_ISA
