// Matmuls with weights of which two of every four columns are stored. Weights stay packed: it is the activations
// that are picked, by the places of the weights.
#pragma once
#include "../linear/product.h"
#include "../quantize/numbers.h"
#include "kernels.h"
#include "pack.h"

namespace ao::AO_ISA {

// -- stored values ------------------------------------------------------------------------------------------

// Signed half bytes, the even ones low.
AO_INLINE F half_bytes(const uint8_t* p) {
  return to_float(shift_right<28>(shift_left<28>(load_nibbles(p))));
}

// 16 stored values of a row, from number `i` on, which is a multiple of 16; all of them must be there.
AO_INLINE F kept_values(const TwoFour& t, const uint8_t* codes, int64_t i) {
  if (t.bits == 4) return half_bytes(codes + i / 2);
  switch (t.value) {
    case ValueType::f32: return load(reinterpret_cast<const float*>(codes) + i);
    case ValueType::bf16: return load_as(Element::bf16, codes + i * 2, 16);
    case ValueType::f16: return load_as(Element::f16, codes + i * 2, 16);
    default: return to_float(sign_extend_byte(load_bytes(codes + i)));
  }
}

AO_INLINE float scale_of(const TwoFour& t, int64_t row, int64_t group) {
  const int64_t i = (t.scale_of_rows ? row * t.scale_groups : 0) + group;
  return sum(load_as(t.scale_type, static_cast<const uint8_t*>(t.scale) + i * bytes_of(t.scale_type), 1));
}

// -- products -----------------------------------------------------------------------------------------------

template <Mode kMode>
struct Picking;

template <>
struct Picking<Mode::f32> {
  static constexpr int64_t kColumns = 32;
  using Weight = F;
  using Places = I;
  AO_INLINE Places places(const uint8_t* p) { return places_of(p); }
  AO_INLINE Weight weight(const TwoFour& t, const uint8_t* codes, int64_t i, float scale) {
    return mul(kept_values(t, codes, i), splat(scale));
  }
  AO_INLINE F dot(F total, Weight w, const uint8_t* x, Places places) {
    return fma(w, pick(reinterpret_cast<const float*>(x), places), total);
  }
};

#if AO_HAS_PAIRS
template <>
struct Picking<Mode::pairs> {
  static constexpr int64_t kColumns = 64;
  using Weight = P;
  using Places = P;
  AO_INLINE Places places(const uint8_t* p) { return pair_places_of(p); }
  AO_INLINE Weight weight(const TwoFour& t, const uint8_t* codes, int64_t i, float) {
    if (t.bits != 4 && t.value == ValueType::bf16) return load_vector(codes + i * 2);
    return join_bf16(kept_values(t, codes, i), kept_values(t, codes, i + 16));
  }
  AO_INLINE F dot(F total, Weight w, const uint8_t* x, Places places) {
    return dot_pairs(total, w, pick_pairs(x, places));
  }
};
#endif

// The end of a row, whose last window may be incomplete, in a copy that is not: (codes, places).
struct Ending {
  alignas(64) uint8_t codes[128], places[16];
};
AO_INLINE void copy_ending(const TwoFour& t, const uint8_t* codes, const uint8_t* places, int64_t column, Ending& end) {
  const int64_t code = column * t.bits / 16, place = column / 8;
  __builtin_memset(&end, 0, sizeof(end));
  __builtin_memcpy(end.codes, codes + code, static_cast<size_t>(t.row_bytes - code));
  __builtin_memcpy(end.places, places + place, static_cast<size_t>(t.place_bytes - place));
}

// Bytes of weights that are asked for before they are read.
constexpr int64_t kPickAhead = 1024;

// kWeights rows of the weight, from `row` on, times kRows rows of activations, from `first` on.
template <Mode kMode, int kWeights, int kRows>
static void pick_rows(const TwoFour& t, int64_t row, int64_t first, float* out) {
  using A = Picking<kMode>;
  const int64_t x_bytes = kMode == Mode::f32 ? 4 : 2, stride = t.width * x_bytes;
  const uint8_t* x = t.x_packed + first * stride;
  const uint8_t *codes[kWeights], *places[kWeights];
  float scales[kWeights];
  F sums[kWeights][kRows];
  for (int n = 0; n < kWeights; ++n) {
    codes[n] = t.codes + (row + n) * t.row_bytes, places[n] = t.places + (row + n) * t.place_bytes;
    scales[n] = 1.0f;
    for (F& total : sums[n]) total = zero();
  }
  const bool grouped = t.scale && t.scale_groups > 1;
  const auto window = [&](int64_t at, int64_t column) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int n = 0; n < kWeights; ++n) {
      const typename A::Weight w = A::weight(t, codes[n], at / 2, scales[n]);
      const typename A::Places where = A::places(places[n] + at / 8);
      __builtin_prefetch(codes[n] + at * t.bits / 16 + kPickAhead);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[n][r] = A::dot(sums[n][r], w, x + r * stride + column * x_bytes, where);
    }
  };
  const int64_t whole = t.k / A::kColumns * A::kColumns;
  int64_t group = -1;
  const auto rescale = [&](int64_t column) {
    if (!grouped || column / t.group == group) return;
    group = column / t.group;
    for (int n = 0; n < kWeights; ++n) scales[n] = scale_of(t, row + n, group);
  };
  for (int64_t column = 0; column < whole; column += A::kColumns) {
    rescale(column);
    window(column, column);
  }
  if (whole < t.k) {
    rescale(whole);
    Ending ends[kWeights];
    for (int n = 0; n < kWeights; ++n) {
      copy_ending(t, codes[n], places[n], whole, ends[n]);
      codes[n] = ends[n].codes, places[n] = ends[n].places;
    }
    window(0, whole);
  }
  for (int n = 0; n < kWeights; ++n) {
    const float scale = t.scale && !grouped ? scale_of(t, row + n, 0) : 1.0f;
    for (int r = 0; r < kRows; ++r) out[r * kWeights + n] = sum(sums[n][r]) * scale;
  }
}

// Rows of the weight, and of activations, that are multiplied together.
constexpr int kPickedWeights = 4, kPickedRows = 4;

template <Mode kMode, int kWeights, int kRows = kPickedRows>
static void pick_some(const TwoFour& t, int64_t row, int64_t first, int64_t count, float* out) {
  if constexpr (kRows > 1) {
    if (count < kRows) return pick_some<kMode, kWeights, kRows - 1>(t, row, first, count, out);
  }
  pick_rows<kMode, kWeights, kRows>(t, row, first, out);
}

template <Mode kMode, int kWeights>
static void pick_all(const TwoFour& t, int64_t row) {
  const int size = bytes_of(t.type);
  for (int64_t first = 0; first < t.m; first += kPickedRows) {
    const int64_t count = t.m - first < kPickedRows ? t.m - first : kPickedRows;
    float out[kPickedRows * kWeights + 16];
    pick_some<kMode, kWeights>(t, row, first, count, out);
    for (int64_t r = 0; r < count; ++r) {
      F v = mul(load(out + r * kWeights), splat(t.x_scale[first + r]));
      if (t.bias) v = add(v, load_as(t.type, static_cast<const uint8_t*>(t.bias) + row * size, kWeights));
      store_as(t.type, static_cast<uint8_t*>(t.y) + ((first + r) * t.n + row) * size, v, kWeights);
    }
  }
}

template <Mode kMode>
static void two_four_as(const TwoFour& t, int64_t begin, int64_t end) {
  for (; begin + kPickedWeights <= end; begin += kPickedWeights) pick_all<kMode, kPickedWeights>(t, begin);
  for (; begin < end; ++begin) pick_all<kMode, 1>(t, begin);
}

static void two_four_rows(const TwoFour& t, int64_t begin, int64_t end) {
#if AO_HAS_PAIRS
  if (t.mode == Mode::pairs) return two_four_as<Mode::pairs>(t, begin, end);
#endif
  two_four_as<Mode::f32>(t, begin, end);
}

static void pack_two_four(const TwoFour& t, int64_t begin, int64_t end) {
  const Element to = t.mode == Mode::f32 ? Element::f32 : Element::bf16;
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t* row = static_cast<const uint8_t*>(t.x) + r * t.x_stride * bytes_of(t.type);
    uint8_t* out = t.x_packed + r * t.width * bytes_of(to);
    const int32_t greatest = greatest_bits(t.type, row, t.k);
    t.x_odd[r] = greatest >= 0x7f800000;
    const float lift = lift_of_finite(greatest);
    t.x_scale[r] = 1.0f / lift;
    for (int64_t k = 0; k < t.width; k += 16, out += 16 * bytes_of(to)) {
      const int64_t rest = t.k - k;
      const int count = rest < 0 ? 0 : rest < 16 ? static_cast<int>(rest) : 16;
      store_as(to, out, mul(load_as(t.type, row + k * bytes_of(t.type), count), splat(lift)), 16);
    }
  }
}

// -- the dense weight -----------------------------------------------------------------------------------------

// 16 stored values, as `kept_values`, of any format.
AO_INLINE F any_kept_values(const TwoFour& t, const uint8_t* codes, int64_t i) {
  if (!t.table) return kept_values(t, codes, i);
  float values[16];
  for (int lane = 0; lane < 16; ++lane, ++i) {
    values[lane] = t.table[t.bits == 4 ? codes[i / 2] >> i % 2 * 4 & 15 : codes[i]];
  }
  return load(values);
}

static void expand_rows(const TwoFour& t, int64_t begin, int64_t end) {
  constexpr int64_t kPiece = 512;  // columns that are expanded before they are rounded
  const int size = bytes_of(t.type);
  for (int64_t n = begin; n < end; ++n) {
    const uint8_t* codes = t.codes + n * t.row_bytes;
    const uint8_t* places = t.places + n * t.place_bytes;
    uint8_t* out = static_cast<uint8_t*>(t.y) + n * t.k * size;
    for (int64_t k = 0; k < t.k; k += kPiece) {
      alignas(64) float dense[kPiece];
      const int64_t last = t.k - k < kPiece ? t.k - k : kPiece;
      for (int64_t column = 0; column < last; column += 32) {
        int64_t at = k + column;
        const float scale = t.scale ? scale_of(t, n, at / t.group) : 1.0f;
        const F removed = mul(zero(), splat(scale));  // NaN, where the scale is
        store(dense + column, removed), store(dense + column + 16, removed);
        Ending ending;
        const uint8_t *own_codes = codes, *own_places = places;
        if (last - column < 32) {
          copy_ending(t, codes, places, at, ending);
          own_codes = ending.codes, own_places = ending.places, at = 0;
        }
        alignas(64) float values[16];
        alignas(64) int32_t where[16];
        store(values, mul(any_kept_values(t, own_codes, at / 2), splat(scale)));
        store_vector(where, places_of(own_places + at / 8));
        for (int i = 0; i < 16; ++i) dense[column + where[i]] = values[i];
      }
      coding::write(t.type, dense, last, out + k * size);  // whose rounding keeps subnormal numbers
    }
  }
}

}  // namespace ao::AO_ISA
