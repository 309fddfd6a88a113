// Tokens to codes; included by the unit of an instruction set.
#pragma once
#include "../hadamard/unit.h"
#include "../quantize/blocks.h"
#include "kernels.h"

namespace ao::AO_ISA::cache {

// f(row, columns) on pieces of 16 x 16 of a matrix (n, k), the last of which may be smaller.
template <class F>
AO_INLINE void by_squares(int64_t n, int64_t k, const F& f) {
  for (int64_t i = 0; i < n; i += 16) {
    for (int64_t j = 0; j < k; j += 16) f(i, j, n - i < 16 ? n - i : 16, k - j < 16 ? k - j : 16);
  }
}

// (n, k) to (k, n); up to 15 more elements than there are may be read.
static inline void transposed(const float* x, int64_t n, int64_t k, float* out) {
  by_squares(n, k, [&](int64_t i, int64_t j, int64_t rows, int64_t columns) {
    I v[16];
    for (int64_t r = 0; r < 16; ++r) v[r] = bits_of(load(x + (i + (r < rows ? r : 0)) * k + j));
    transpose(v);
    for (int64_t c = 0; c < columns; ++c) {
      store_as(Element::f32, out + (j + c) * n + i, as_float(v[c]), static_cast<int>(rows));
    }
  });
}
static inline void transposed(const uint8_t* x, int64_t n, int64_t k, uint8_t* out) {
  by_squares(n, k, [&](int64_t i, int64_t j, int64_t rows, int64_t columns) {
    I v[16];
    for (int64_t r = 0; r < 16; ++r) v[r] = load_bytes(x + (i + (r < rows ? r : 0)) * k + j);
    transpose(v);
    for (int64_t c = 0; c < columns; ++c) {
      uint8_t bytes[16];
      store_bytes(bytes, v[c]);
      __builtin_memcpy(out + (j + c) * n + i, bytes, static_cast<size_t>(rows));
    }
  });
}

// Tokens of a head as floats (count, size), less the center.
static inline void read_tokens(const EncodeTokens& c, const EncodeSide& s, int64_t matrix, int64_t token, int64_t count,
                               float* out) {
  const int64_t b = matrix / c.heads, h = matrix % c.heads, element = bytes_of(c.type);
  const float* const center = s.center ? s.center + matrix * s.size : nullptr;
  for (int64_t t = token; t < token + count; ++t, out += s.size) {
    const bool is_new = t >= c.tokens;
    const int64_t place = is_new ? b * s.rows.batch + h * s.rows.head + (t - c.tokens) * s.rows.token
                                 : (matrix * c.slots + t % c.slots) * s.size;
    const auto* const p = static_cast<const uint8_t*>(is_new ? s.rows.data : s.tail) + place * element;
    for (int64_t i = 0; i < s.size; i += 16) {
      const int left = s.size - i < 16 ? static_cast<int>(s.size - i) : 16;
      F x = load_as(c.type, p + i * element, left);
      if (center) x = sub(x, load_as(Element::f32, center + i, left));
      store_as(Element::f32, out + i, x, left);
    }
  }
}

// Half of the greatest number that float32 holds, as bits.
constexpr uint32_t kHalf = 0x7effffff;

// The bits of the greatest magnitude; more than kInfinity where there is NaN.
static inline uint32_t greatest_of(const float* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = coding::bits_of(x[i]) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

static inline void* shifted(void* p, int64_t bytes) { return static_cast<uint8_t*>(p) + bytes; }

// Rows of x, each of whole blocks, to the scales from place `at` on and the codes from `codes` on.
static inline void encode_rows(Quantize& q, const float* x, int64_t rows, int64_t columns, int64_t block, int64_t at) {
  const int64_t groups = (columns + block - 1) / block;
  q.x = x, q.type = Element::f32;
  q.blocks = {1, rows, columns, 1, block, rows, groups};
  q.chunk_groups = groups, q.chunks = 1;
  q.scale = shifted(q.scale, at * bytes_of(q.scale_type));
  if (q.zero_type != Zero::none) q.zero = shifted(q.zero, at * bytes_of(q.zero_type));
  coding::quantize_fused(q, 0, rows);
}

static bool encode_block(const EncodeTokens& c, const EncodeSide& s, int64_t matrix, int64_t block, uint8_t* memory) {
  const int64_t start = block * kCacheBlock, token = start > c.begin ? start : c.begin;
  const int64_t end = start + kCacheBlock < c.end ? start + kCacheBlock : c.end, count = end - token;
  const int64_t wide = (s.size + 15) / 16 * 16;
  auto* const x = reinterpret_cast<float*>(memory);
  auto* const turned = x + kCacheBlock * wide + 64;
  auto* const codes = reinterpret_cast<uint8_t*>(turned + kCacheBlock * wide + 64);
  uint8_t* const rows = codes + kCacheBlock * wide + 64;
  auto* const rest = reinterpret_cast<float*>(rows + kCacheBlock * wide + 64);
  read_tokens(c, s, matrix, token, count, x);
  if (s.rotation.block) {
    const bool finite = greatest_of(x, count * s.size) < coding::kInfinity;
    Hadamard h = s.rotation;
    h.x = h.y = x, h.type = Element::f32, h.count = count * s.size;
    AO_ISA::rotation::transform(h, 0, (h.count + h.unit - 1) / h.unit, rest);
    if (finite && greatest_of(x, count * s.size) > kHalf) return false;
  }
  const Blocks& b = s.coded.blocks;
  Quantize q = s.coded;
  uint8_t* const to = q.codes + (matrix * b.n + token) * q.row_bytes;
  if (b.block_n == 1) {
    q.codes = to;
    encode_rows(q, x, count, s.size, b.block_k, (matrix * b.n + token) * b.groups);
    return true;
  }
  // elements of several tokens share a scale: rows are those of each element
  const int bits = q.code_bits;
  for (int64_t t = 0; t < count; t += b.block_n) {
    transposed(x + t * s.size, b.block_n, s.size, turned);
    Quantize band = s.coded;
    band.codes = codes, band.row_bytes = b.block_n, band.code_bits = 8;
    encode_rows(band, turned, s.size, b.block_n, b.block_n, (matrix * b.bands + (token + t) / b.block_n) * s.size);
    transposed(codes, s.size, b.block_n, rows);
    for (int64_t i = 0; i < b.block_n; ++i) {
      coding::pack_codes(rows + i * s.size, s.size, bits, to + (t + i) * q.row_bytes);
    }
  }
  return true;
}

static const CacheKernels kCacheKernels = {.encode = encode_block};

}  // namespace ao::AO_ISA::cache
