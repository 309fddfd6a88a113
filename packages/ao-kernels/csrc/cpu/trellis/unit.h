// Matmuls with weights on a trellis, and their dense values; included by the unit of an instruction set.
#pragma once
#include "decode.h"
#include "search.h"

namespace ao::AO_ISA::trellis {

// Rows of activations whose sums stay in registers.
constexpr int64_t kRowsAtOnce = kRegisters == 1 ? 5 : 1;
// Columns that are decoded once for more rows than that.
constexpr int64_t kColumns = 128;

// w (columns, 64) times columns of `count` rows, on top of sums (count, 64).
template <int kRows, class Weights>
AO_INLINE void add_products(const Trellis& t, const float* x, int64_t columns, float* sums, const Weights& weights) {
  F sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * kHalf + 16 * v);
  }
  for (int64_t c = 0; c < columns; ++c) {
    F w[kVectors];
    weights(c, w);
    for (int r = 0; r < kRows; ++r) {
      const F one = splat(x[r * t.k + c]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(one, w[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(sums + r * kHalf + 16 * v, sum[r][v]);
  }
}

template <class Weights>
AO_INLINE void add_rows(const Trellis& t, const float* x, int64_t rows, int64_t columns, float* sums,
                        const Weights& weights) {
  switch (rows) {
    case 1: return add_products<1>(t, x, columns, sums, weights);
    case 2: return add_products<2>(t, x, columns, sums, weights);
    case 3: return add_products<3>(t, x, columns, sums, weights);
    case 4: return add_products<4>(t, x, columns, sums, weights);
    default: return add_products<5>(t, x, columns, sums, weights);
  }
}

// Sums (m, 64) times the scales of their rows, with the bias, to y.
static inline void write(const Trellis& t, int64_t half, const float* sums) {
  const int64_t size = bytes_of(t.type), first = half * kHalf;
  for (int64_t v = 0; v < kVectors && first + 16 * v < t.n; ++v) {
    const int64_t at = first + 16 * v;
    const int count = t.n - at < 16 ? static_cast<int>(t.n - at) : 16;
    const auto* scales = static_cast<const uint8_t*>(t.scale) + at * bytes_of(t.scale_type);
    const F scale = mul(load_as(t.scale_type, scales, count), splat(1 / kUnit));
    for (int64_t r = 0; r < t.m; ++r) {
      F y = mul(load(sums + r * kHalf + 16 * v), scale);
      if (t.bias) y = add(y, load_as(t.type, static_cast<const uint8_t*>(t.bias) + at * size, count));
      store_as(t.type, static_cast<uint8_t*>(t.y) + (r * t.n + at) * size, y, count);
    }
  }
}

template <int kBits>
static inline void multiply_halves(const Trellis& t, int64_t begin, int64_t end, uint8_t* scratch) {
  constexpr int64_t kBytes = kRing * kBits / 8;
  const FastDecoder<kBits> decoder(t);
  float* const panel = reinterpret_cast<float*>(scratch);
  float* const sums = panel + kColumns * kHalf;
  for (int64_t half = begin; half < end; ++half) {
    const uint8_t* const rings = t.qdata + half / 2 * t.k * kBytes;
    __builtin_memset(sums, 0, static_cast<size_t>(t.m * kHalf) * sizeof(float));
    if (t.m <= kRowsAtOnce) {
      add_rows(t, t.rows, t.m, t.k, sums, [&](int64_t c, F(&w)[kVectors]) {
        decoder.decode(rings + c * kBytes, half % 2, w);
      });
    } else {
      for (int64_t start = 0; start < t.k; start += kColumns) {
        const int64_t columns = t.k - start < kColumns ? t.k - start : kColumns;
        for (int64_t c = 0; c < columns; ++c) {
          F w[kVectors];
          decoder.decode(rings + (start + c) * kBytes, half % 2, w);
          for (int v = 0; v < kVectors; ++v) store(panel + c * kHalf + 16 * v, w[v]);
        }
        for (int64_t row = 0; row < t.m; row += kRowsAtOnce) {
          const int64_t rows = t.m - row < kRowsAtOnce ? t.m - row : kRowsAtOnce;
          add_rows(t, t.rows + row * t.k + start, rows, columns, sums + row * kHalf, [&](int64_t c, F(&w)[kVectors]) {
            for (int v = 0; v < kVectors; ++v) w[v] = load(panel + c * kHalf + 16 * v);
          });
        }
      }
    }
    write(t, half, sums);
  }
}

// Dense values of the rows of halves, to y (n, k).
template <int kBits>
static inline void decode_halves(const Trellis& t, int64_t begin, int64_t end, uint8_t* scratch) {
  constexpr int64_t kBytes = kRing * kBits / 8, kAside = 16;
  const FastDecoder<kBits> decoder(t);
  float* const panel = reinterpret_cast<float*>(scratch);
  const int64_t size = bytes_of(t.type);
  alignas(64) float scale[kHalf];
  for (int64_t half = begin; half < end; ++half) {
    const uint8_t* const rings = t.qdata + half / 2 * t.k * kBytes;
    const int64_t first = half * kHalf, rows = t.n - first < kHalf ? t.n - first : kHalf;
    for (int64_t r = 0; r < rows; r += 16) {
      const int count = rows - r < 16 ? static_cast<int>(rows - r) : 16;
      store(scale + r, load_as(t.scale_type, static_cast<const uint8_t*>(t.scale) + (first + r) * bytes_of(t.scale_type), count));
    }
    for (int64_t start = 0; start < t.k; start += kAside) {
      const int count = t.k - start < kAside ? static_cast<int>(t.k - start) : static_cast<int>(kAside);
      for (int64_t c = 0; c < count; ++c) {
        F w[kVectors];
        decoder.decode(rings + (start + c) * kBytes, half % 2, w);
        for (int v = 0; v < kVectors; ++v) {
          alignas(64) float lanes[16];
          store(lanes, mul(w[v], splat(1 / kUnit)));
          for (int i = 0; i < 16; ++i) panel[(16 * v + i) * kAside + c] = lanes[i];
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        const F y = mul(load(panel + r * kAside), splat(scale[r]));
        store_as(t.type, static_cast<uint8_t*>(t.y) + ((first + r) * t.k + start) * size, y, count);
      }
    }
  }
}

static inline void multiply(const Trellis& t, int64_t begin, int64_t end, uint8_t* scratch) {
  if (t.bits == 2) return multiply_halves<2>(t, begin, end, scratch);
  if (t.bits == 3) return multiply_halves<3>(t, begin, end, scratch);
  multiply_halves<4>(t, begin, end, scratch);
}
static inline void decode(const Trellis& t, int64_t begin, int64_t end, uint8_t* scratch) {
  if (t.bits == 2) return decode_halves<2>(t, begin, end, scratch);
  if (t.bits == 3) return decode_halves<3>(t, begin, end, scratch);
  decode_halves<4>(t, begin, end, scratch);
}
static inline int64_t scratch_of(const Trellis& t) {
  return (kColumns + (t.x ? t.m : 0)) * kHalf * static_cast<int64_t>(sizeof(float));
}

static inline void widen(const Trellis& t, int64_t begin, int64_t end, float* rows) {
  const int64_t size = bytes_of(t.type);
  for (int64_t r = begin; r < end; ++r) {
    const auto* const x = static_cast<const uint8_t*>(t.x) + r * t.x_stride * size;
    for (int64_t c = 0; c < t.k; c += 16) {
      const int count = t.k - c < 16 ? static_cast<int>(t.k - c) : 16;
      const F v = load_as(t.type, x + c * size, count);
      if (count == 16) {
        store(rows + r * t.k + c, v);
      } else {
        store_as(Element::f32, rows + r * t.k + c, v, count);
      }
    }
  }
}

static const TrellisKernels kTrellisKernels = {
    .search_scratch = search_scratch,
    .search = search,
    .widen = widen,
    .scratch = scratch_of,
    .multiply = multiply,
    .decode = decode,
};

}  // namespace ao::AO_ISA::trellis
