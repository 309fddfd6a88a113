// Blocks of numbers and moments, from memory and back.
#pragma once
#include "interpret.h"
#include "unit.h"

namespace ao::AO_ISA::programs {

using optim::as_float;
using optim::bits_of;

// Up to 256 numbers as floats, and zeros.
static inline void load_numbers(Element type, const void* from, int count, float* out) {
  const uint8_t* at = static_cast<const uint8_t*>(from);
  for (int i = 0; i < kBlock; i += 16) {
    store(out + i, i < count ? load_as(type, at + i * bytes_of(type), count - i) : splat(0.0f));
  }
}

// noise: 16 bits for every number to be rounded to bfloat16 with, or nullptr: to nearest.
static inline void store_numbers(Element type, void* to, const float* values, int count, const uint32_t* noise) {
  uint8_t* at = static_cast<uint8_t*>(to);
  if (noise != nullptr && type == Element::bf16) {
    uint16_t words[kBlock];
    optim::store_block<Element::bf16>(words, values, noise);
    __builtin_memcpy(to, words, sizeof(uint16_t) * static_cast<size_t>(count));
    return;
  }
  for (int i = 0; i < count; i += 16) store_as(type, at + i * bytes_of(type), load(values + i), count - i);
}

// `whole` bytes of which only the first may be there: then a copy with zeros.
static inline const uint8_t* padded(const uint8_t* from, int there, int whole, uint8_t* copy) {
  if (there >= whole) return from;
  __builtin_memset(copy, 0, static_cast<size_t>(whole));
  __builtin_memcpy(copy, from, static_cast<size_t>(there));
  return copy;
}

// f(row, column, i, n): of elements from..from + count of a matrix, each run of n in a row, which begins with the i-th.
template <class Run>
static inline void by_rows(int64_t columns, int64_t from, int count, Run run) {
  int64_t row = from / columns, column = from % columns;
  for (int i = 0; i < count; ++row, column = 0) {
    const int n = columns - column < count - i ? static_cast<int>(columns - column) : count - i;
    run(row, column, i, n);
    i += n;
  }
}

// The scale of each element; where one of a row or column is NaN, all of them are.
static inline void spread(const float* rows, const float* columns, int64_t width, int64_t from, int count, float* out) {
  if (count < kBlock) __builtin_memset(out, 0, sizeof(float) * kBlock);
  by_rows(width, from, count, [&](int64_t row, int64_t column, int i, int n) {
    const float by = rows[row], *others = columns + column;
    for (int j = 0; j < n; ++j) out[i + j] = others[j] < by ? others[j] : by;
  });
}

static inline void load_moment(const MomentKind& kind, const ProgramTensor& t, const ProgramMoment& m, int64_t from,
                               int count, float* out) {
  const uint8_t* codes = static_cast<const uint8_t*>(m.codes);
  alignas(64) uint8_t copy[kBlock];
  if (kind.keep == Keep::dense) return load_numbers(kind.type, codes + from * bytes_of(kind.type), count, out);
  if (kind.keep == Keep::bytes) {
    return optim::decode_block(kind.bytes, padded(codes + from, count, kBlock, copy), m.scales[from / kBlock], out);
  }
  codes = padded(codes + from / 2, (count + 1) / 2, kBlock / 2, copy);
  float scales[kBlock];
  if (kind.keep == Keep::rank1) {
    spread(m.scales, m.columns, t.columns, from, count, scales);
  } else {
    const float* own = m.scales + from / kNibbleBlock;
    const float first = own[0], second = count > kNibbleBlock ? own[1] : 0;
    for (int i = 0; i < kBlock; ++i) scales[i] = i < kNibbleBlock ? first : second;
  }
  for (int i = 0; i < kBlock; i += 16) {
    store(out + i, mul(pick(kind.nibbles.values, load_nibbles(codes + i / 2)), load(scales + i)));
  }
}

// Codes of 4 bits of numbers over their scales.
static inline void store_nibbles(const NibbleFormat& f, const float* values, const float* scales, bool has_nan,
                                 int count, uint8_t* to) {
  uint8_t codes[kBlock], packed[kBlock / 2];
  for (int i = 0; i < kBlock; ++i) {
    const int32_t bits = static_cast<int32_t>(bits_of(values[i] / scales[i]));
    const int32_t key = bits ^ (bits >> 31 & 0x7fffffff);
    int32_t interval = 0;
    for (int j = 0; j < 15; ++j) interval += key >= f.steps[j];
    codes[i] = static_cast<uint8_t>(interval);
  }
  if (!f.in_order) {
    for (int i = 0; i < kBlock; ++i) codes[i] = f.order[codes[i]];
  }
  for (int i = 0; has_nan && i < count; ++i) {
    if (scales[i] != scales[i]) codes[i] = f.nan_code;
  }
  for (int i = count; i < kBlock; ++i) codes[i] = 0;
  for (int i = 0; i < kBlock / 2; ++i) packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  __builtin_memcpy(to, packed, static_cast<size_t>(count + 1) / 2);
}

static inline void store_moment(const MomentKind& kind, const ProgramTensor& t, const ProgramMoment& m, int64_t from,
                                int count, Numbers& of, const uint32_t* noise) {
  uint8_t* codes = static_cast<uint8_t*>(m.codes);
  if (kind.keep == Keep::dense) {
    return store_numbers(kind.type, codes + from * bytes_of(kind.type), of.values, count, noise);
  }
  if (kind.keep == Keep::bytes) {
    of.greatest = optim::greatest_of(of.values, count), of.unit = 1, of.is_split = false;
    const float scale = m.scales[from / kBlock] = optim::scale_of(kind.bytes, of);
    return optim::store_codes(kind.bytes, of, scale, count, codes + from);
  }
  const NibbleFormat& f = kind.nibbles;
  float scales[kBlock];
  bool has_nan = false;
  if (kind.keep == Keep::rank1) {
    spread(m.new_rows, m.new_columns, t.columns, from, count, scales);
    has_nan = scales[0] != scales[0];
  } else {
    for (int i = 0; i < kBlock; i += kNibbleBlock) {
      const int own = count - i < kNibbleBlock ? count - i : kNibbleBlock;
      const float greatest = own > 0 ? as_float(optim::greatest_of(of.values + i, own)) : 0;
      const float scale = optim::stored_scale(greatest, f.reach, f.of_zeros);
      if (own > 0) m.scales[(from + i) / kNibbleBlock] = scale;
      has_nan = has_nan || scale != scale;
      for (int j = i; j < i + kNibbleBlock; ++j) scales[j] = scale;
    }
  }
  store_nibbles(f, of.values, scales, has_nan, count, codes + from / 2);
}

}  // namespace ao::AO_ISA::programs
