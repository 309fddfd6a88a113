// Hadamard transforms; included by the unit of an instruction set.
//
// Sums of a power of two are butterflies, neighbours first, as ao_core.numerics has them, so results have the
// same bits. Those of another factor are added up in the order of its columns. Products with ±1 are exact, so all
// instruction sets give the same bits.
#pragma once
#include "kernels.h"

namespace ao::AO_ISA::rotation {

// Vectors that are loaded, take part in butterflies among themselves, and are stored.
constexpr int kTogether = 8 / kRegisters;
// Vectors of a row that are added up together by a factor, of kRows of its rows.
constexpr int kColumns = kRegisters == 1 ? 2 : 1;
constexpr int kRows = 4;

// In lanes whose number has the bit kDistance, -1.
template <int kDistance>
AO_INLINE F signs() {
  alignas(64) static constexpr auto made = [] {
    struct {
      float lane[16];
    } of{};
    for (int i = 0; i < 16; ++i) of.lane[i] = i & kDistance ? -1.0f : 1.0f;
    return of;
  }();
  return load(made.lane);
}

// Butterflies of lanes, up to blocks of `power`.
AO_INLINE F mix_lanes(F v, int64_t power) {
  if (power > 1) v = fma(v, signs<1>(), swap_lanes<1>(v));
  if (power > 2) v = fma(v, signs<2>(), swap_lanes<2>(v));
  if (power > 4) v = fma(v, signs<4>(), swap_lanes<4>(v));
  if (power > 8) v = fma(v, signs<8>(), swap_lanes<8>(v));
  return v;
}

// Butterflies of vectors, neighbours first.
template <int kCount>
AO_INLINE void mix_vectors(F (&v)[kCount]) {
#pragma GCC unroll 4
  for (int distance = 1; distance < kCount; distance *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      if (i & distance) continue;
      const F a = v[i], b = v[i + distance];
      v[i] = add(a, b), v[i + distance] = sub(a, b);
    }
  }
}

// Rounds of butterflies of elements `distance`, 2 * distance, ... apart, log2(kCount) of them.
template <int kCount>
static inline void rounds(float* a, int64_t size, int64_t distance) {
  for (int64_t group = 0; group < size; group += kCount * distance) {
    for (int64_t i = group; i < group + distance; i += 16) {
      F v[kCount];
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) v[j] = load(a + i + j * distance);
      mix_vectors(v);
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) store(a + i + j * distance, v[j]);
    }
  }
}

// All rounds from `distance`, a multiple of 16, to below `end`.
static inline void butterflies(float* a, int64_t size, int64_t distance, int64_t end) {
  while (distance < end) {
    const int64_t left = end / distance;
    if (left >= kTogether) {
      rounds<kTogether>(a, size, distance);
      distance *= kTogether;
    } else {
      rounds<2>(a, size, distance);
      distance *= 2;
    }
  }
}

// kRows rows of a factor times kCount vectors.
template <int kCount>
AO_INLINE void multiply(const Factor& f, const float* from, float* to, int64_t inner, int64_t row) {
  F sums[kRows][kCount];
  for (auto& of_row : sums) {
    for (F& sum : of_row) sum = zero();
  }
  const float* signs = f.signs + row * f.row;
  for (int64_t j = 0; j < f.order; ++j) {
    F v[kCount];
#pragma GCC unroll 2
    for (int c = 0; c < kCount; ++c) v[c] = load(from + j * inner + c * 16);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const F sign = splat(signs[r * f.row + j * f.column]);
#pragma GCC unroll 2
      for (int c = 0; c < kCount; ++c) sums[r][c] = fma(sign, v[c], sums[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCount; ++c) store(to + (row + r) * inner + c * 16, sums[r][c]);
  }
}

// A factor along the middle dimension of (…, order, inner), `inner` a multiple of 16.
static inline void multiply_all(const Factor& f, const float* from, float* to, int64_t size, int64_t inner) {
  for (int64_t part = 0; part < size; part += f.order * inner) {
    int64_t c = 0;
    for (; c + 16 * kColumns <= inner; c += 16 * kColumns) {
      for (int64_t row = 0; row < f.order; row += kRows) {
        multiply<kColumns>(f, from + part + c, to + part + c, inner, row);
      }
    }
    for (; c < inner; c += 16) {
      for (int64_t row = 0; row < f.order; row += kRows) multiply<1>(f, from + part + c, to + part + c, inner, row);
    }
  }
}

// Where elements are after all factors: in `a`, or in what lies `size` behind it.
static inline float* multiply_factors(const Hadamard& h, float* a, int64_t size, int64_t inner) {
  float* other = a + size;
  for (int i = 0; i < h.factors; ++i) {
    multiply_all(h.factor[i], a, other, size, inner);
    inner *= h.factor[i].order;
    float* const result = other;
    other = a, a = result;
  }
  return a;
}

AO_INLINE F load_scaled(const Hadamard& h, int64_t at, int count) {
  const auto* x = static_cast<const uint8_t*>(h.x) + at * bytes_of(h.type);
  return mul(load_as(h.type, x, count), splat(h.before));
}
AO_INLINE void store_scaled(const Hadamard& h, int64_t at, F v, int count) {
  store_as(h.type, static_cast<uint8_t*>(h.y) + at * bytes_of(h.type), mul(v, splat(h.after)), count);
}

// Blocks of less than 16 elements, whole ones in each vector.
static inline void transform_short(const Hadamard& h, int64_t first, int64_t last) {
  for (int64_t at = first; at < last; at += 16) {
    const int count = last - at < 16 ? static_cast<int>(last - at) : 16;
    store_scaled(h, at, mix_lanes(load_scaled(h, at, count), h.power), count);
  }
}

// One block whose power of two fills vectors.
static inline void transform_block(const Hadamard& h, int64_t first, float* a) {
  constexpr int64_t kStep = 16 * kTogether;
  int64_t distance = 16;
  if (h.power >= kStep) {
    for (int64_t i = 0; i < h.block; i += kStep) {
      F v[kTogether];
#pragma GCC unroll 8
      for (int j = 0; j < kTogether; ++j) v[j] = mix_lanes(load_scaled(h, first + i + 16 * j, 16), 16);
      mix_vectors(v);
#pragma GCC unroll 8
      for (int j = 0; j < kTogether; ++j) store(a + i + 16 * j, v[j]);
    }
    distance = kStep;
  } else {
    for (int64_t i = 0; i < h.block; i += 16) store(a + i, mix_lanes(load_scaled(h, first + i, 16), 16));
  }
  butterflies(a, h.block, distance, h.power);
  a = multiply_factors(h, a, h.block, h.power);
  for (int64_t i = 0; i < h.block; i += 16) store_scaled(h, first + i, load(a + i), 16);
}

// Up to kLanes blocks, one in each lane.
static inline void transform_lanes(const Hadamard& h, int64_t first, int64_t last, float* a) {
  const int64_t size = kLanes * h.block, blocks = (last - first) / h.block;
  if (blocks < kLanes) __builtin_memset(a, 0, static_cast<size_t>(size) * sizeof(float));
  alignas(64) float part[16];
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < h.block; i += 16) {
      const int count = h.block - i < 16 ? static_cast<int>(h.block - i) : 16;
      store(part, load_scaled(h, first + b * h.block + i, count));
      for (int lane = 0; lane < count; ++lane) a[(i + lane) * kLanes + b] = part[lane];
    }
  }
  butterflies(a, size, kLanes, kLanes * h.power);
  a = multiply_factors(h, a, size, kLanes * h.power);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < h.block; i += 16) {
      const int count = h.block - i < 16 ? static_cast<int>(h.block - i) : 16;
      for (int lane = 0; lane < count; ++lane) part[lane] = a[(i + lane) * kLanes + b];
      store_scaled(h, first + b * h.block + i, load(part), count);
    }
  }
}

static inline void transform(const Hadamard& h, int64_t begin, int64_t end, float* scratch) {
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = unit * h.unit, last = first + h.unit < h.count ? first + h.unit : h.count;
    if (h.power >= 16) {
      transform_block(h, first, scratch);
    } else if (h.factors == 0) {
      transform_short(h, first, last);
    } else {
      transform_lanes(h, first, last, scratch);
    }
  }
}

static const HadamardKernels kHadamardKernels = {.transform = transform};

}  // namespace ao::AO_ISA::rotation
