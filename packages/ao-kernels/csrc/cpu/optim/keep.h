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

// Codes of 4 bits of `n` elements of a row, of which the first one is in the upper half of its byte where `odd` is 1.
static inline void unpack_run(const uint8_t* from, int odd, int n, uint8_t* codes) {
  uint8_t bytes[kBlock / 2 + 1], all[kBlock + 2];
  const int size = (odd + n + 1) / 2;
  __builtin_memcpy(bytes, from, static_cast<size_t>(size));
  for (int i = 0; i < size; ++i) all[2 * i] = bytes[i] & 15, all[2 * i + 1] = bytes[i] >> 4;
  __builtin_memcpy(codes, all + odd, static_cast<size_t>(n));
}

// Half a byte, whose other half another thread may write at the same time.
static inline void write_half(uint8_t* to, uint8_t half, uint8_t kept) {
  __atomic_fetch_and(to, kept, __ATOMIC_RELAXED);
  __atomic_fetch_or(to, half, __ATOMIC_RELAXED);
}

static inline void pack_run(uint8_t* to, int odd, int n, bool ends_row, const uint8_t* codes) {
  uint8_t bytes[kBlock / 2 + 1], all[kBlock + 2];
  const int size = (odd + n + 1) / 2;
  all[0] = all[2 * size - 1] = 0;
  __builtin_memcpy(all + odd, codes, static_cast<size_t>(n));
  for (int i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(all[2 * i] | all[2 * i + 1] << 4);
  const int last = size - ((odd + n) % 2 != 0 && !ends_row);  // the first byte that is not this run's alone
  if (last > odd) __builtin_memcpy(to + odd, bytes + odd, static_cast<size_t>(last - odd));
  if (odd) write_half(to, bytes[0], 0x0f);
  if (last < size) write_half(to + last, bytes[last], 0xf0);
}

static inline void pack_codes(const uint8_t* codes, int count, uint8_t* to) {
  uint8_t packed[kBlock / 2];
  for (int i = 0; i < kBlock / 2; ++i) packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  __builtin_memcpy(to, packed, static_cast<size_t>(count + 1) / 2);
}

static inline void load_moment(const MomentKind& kind, const ProgramTensor& t, const ProgramMoment& m, int64_t from,
                               int count, float* out) {
  const uint8_t* codes = static_cast<const uint8_t*>(m.codes);
  alignas(64) uint8_t copy[kBlock];
  if (kind.keep == Keep::dense) return load_numbers(kind.type, codes + from * bytes_of(kind.type), count, out);
  if (kind.keep == Keep::bytes) {
    return optim::decode_block(kind.bytes, padded(codes + from, count, kBlock, copy), m.scales[from / kBlock], out);
  }
  const bool splits = kind.keep == Keep::rank1 && t.columns % 2 != 0;  // rows begin with a new byte
  if (splits) {
    uint8_t apart[kBlock] = {};
    by_rows(t.columns, from, count, [&](int64_t row, int64_t column, int i, int n) {
      unpack_run(codes + row * ((t.columns + 1) / 2) + column / 2, static_cast<int>(column % 2), n, apart + i);
    });
    pack_codes(apart, kBlock, copy);
    codes = copy;
  } else {
    codes = padded(codes + from / 2, (count + 1) / 2, kBlock / 2, copy);
  }
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

// Codes of 4 bits of numbers over their scales, zeros from `count` on.
static inline void nibbles_of(const NibbleFormat& f, const float* values, const float* scales, bool has_nan,
                              int count, uint8_t* codes) {
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
  uint8_t found[kBlock];
  nibbles_of(f, of.values, scales, has_nan, count, found);
  if (kind.keep != Keep::rank1 || t.columns % 2 == 0) return pack_codes(found, count, codes + from / 2);
  by_rows(t.columns, from, count, [&](int64_t row, int64_t column, int i, int n) {
    uint8_t* to = codes + row * ((t.columns + 1) / 2) + column / 2;
    pack_run(to, static_cast<int>(column % 2), n, column + n == t.columns, found + i);
  });
}

}  // namespace ao::AO_ISA::programs
