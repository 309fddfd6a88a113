// Blocks of moments on AVX-512: tables of 256 codes are looked up in registers, 64 at a time.
#pragma once
#include <immintrin.h>

#include "../simd/bytes512.h"
#include "numbers.h"

namespace ao::AO_ISA::optim {

// Blocks are prefetched so many blocks ahead; 0: that is left to the hardware.
constexpr int kAhead = 0;

// kFirst, kFirst + 2, ...: which elements of two vectors are kept.
template <class T>
struct Indices {
  T index[64 / sizeof(T)];
};
template <class T, int kFirst>
constexpr Indices<T> every_second() {
  Indices<T> made{};
  for (int i = 0; i < static_cast<int>(64 / sizeof(T)); ++i) made.index[i] = static_cast<T>(2 * i + kFirst);
  return made;
}

// 64 bytes of a table of 256.
static inline __m512i look_up(const uint8_t* table, __m512i index) {
  const __m512i parts[4] = {_mm512_loadu_si512(table), _mm512_loadu_si512(table + 64), _mm512_loadu_si512(table + 128),
                            _mm512_loadu_si512(table + 192)};
  return bytes_at(index, parts);
}

// Where groups of 4 bytes go so that the unpacking of bytes to floats brings them back in order.
static inline __m512i order_of_unpacked() {
  return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}

// The floats of 64 upper halves.
static inline void unpack_halves(__m512i low, __m512i high, __m512 out[4]) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
  out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, first));
  out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, first));
  out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, second));
  out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, second));
}

// 64 floats of a table of 256, which is stored by bytes.
static inline void look_up_floats(const uint8_t (*table)[256], __m512i index, __m512 out[4]) {
  index = _mm512_permutexvar_epi32(order_of_unpacked(), index);
  const __m512i a = look_up(table[0], index), b = look_up(table[1], index);
  const __m512i c = look_up(table[2], index), d = look_up(table[3], index);
  const __m512i ab = _mm512_unpacklo_epi8(a, b), ab2 = _mm512_unpackhi_epi8(a, b);
  const __m512i cd = _mm512_unpacklo_epi8(c, d), cd2 = _mm512_unpackhi_epi8(c, d);
  out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab, cd));
  out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab, cd));
  out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab2, cd2));
  out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab2, cd2));
}

// Values of 64 codes of the first (kM) or second moment, times what `unit_of` has.
template <MomentFormat kValues, bool kM>
static inline void decode(const StateFormat& f, const uint8_t* codes, __m512 out[4]) {
  if constexpr (kValues == MomentFormat::companded) {
    for (int j = 0; j < 4; ++j) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * j));
      if constexpr (kM) {
        const __m512i i = _mm512_cvtepi8_epi32(_mm_sub_epi8(bytes, _mm_set1_epi8(127)));
        const __m512 root = _mm512_cvtepi32_ps(i);
        out[j] = _mm512_mul_ps(root, _mm512_abs_ps(root));
      } else {
        const __m512 root = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
        const __m512 square = _mm512_mul_ps(root, root);
        out[j] = _mm512_mul_ps(square, square);
      }
    }
  } else {
    const __m512i index = _mm512_loadu_si512(codes);
    if constexpr (kValues == MomentFormat::any) return look_up_floats(f.value_bytes, index, out);
    const __m512i ordered = _mm512_permutexvar_epi32(order_of_unpacked(), index);
    unpack_halves(look_up(f.value_bytes[2], ordered), look_up(f.value_bytes[3], ordered), out);
  }
}

template <MomentFormat kValues, bool kM>
static inline float unit_of() {
  return kValues != MomentFormat::companded ? 1.0f : 1.0f / (kM ? ao::optim::kSquares : ao::optim::kFourths);
}

static inline void decode_block(const StateFormat& f, const uint8_t* codes, float scale, float* out) {
  const __m512 by = _mm512_set1_ps(scale);
  for (int i = 0; i < kBlock; i += 64) {
    __m512 values[4];
    look_up_floats(f.value_bytes, _mm512_loadu_si512(codes + i), values);
    for (int j = 0; j < 4; ++j) _mm512_storeu_ps(out + i + 16 * j, _mm512_mul_ps(values[j], by));
  }
}

// Cells of 32 numbers, from two vectors of them.
static inline __m512i cells_of(const StateFormat& f, __m512 first, __m512 second) {
  alignas(64) static constexpr auto kOdd = every_second<uint16_t, 1>();
  const __m512i upper = _mm512_permutex2var_epi16(_mm512_castps_si512(first), _mm512_load_si512(kOdd.index),
                                                  _mm512_castps_si512(second));
  __m512i a = _mm512_and_si512(upper, _mm512_set1_epi16(0x7fff));
  a = _mm512_max_epu16(a, _mm512_set1_epi16(static_cast<int16_t>(f.least)));
  a = _mm512_min_epu16(a, _mm512_set1_epi16(static_cast<int16_t>(f.greatest)));
  const __m512i exponent = _mm512_srli_epi16(a, 7);
  const __m512i shift = _mm512_permutexvar_epi16(exponent, _mm512_loadu_si512(f.shift));
  const __m512i offset = _mm512_permutexvar_epi16(exponent, _mm512_loadu_si512(f.offset));
  const __m512i cell = _mm512_sub_epi16(_mm512_srlv_epi16(a, shift), offset);
  const __m512i negative = _mm512_set1_epi16(static_cast<int16_t>(f.negative));
  return _mm512_mask_add_epi16(cell, _mm512_movepi16_mask(upper), cell, negative);
}

// The lower bytes of 64 words, in order.
static inline __m512i low_bytes_of(__m512i first, __m512i second) {
  if constexpr (kHasByteMoves) {
    alignas(64) static constexpr auto kEven = every_second<uint8_t, 0>();
    return bytes_at(_mm512_load_si512(kEven.index), first, second);
  }
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(first)), _mm512_cvtepi16_epi8(second), 1);
}

// Codes of the numbers of a block / scale, none of which is NaN. In phases, whose short chains overlap.
static inline void look_up_codes(const StateFormat& f, const float* numbers, float scale, uint8_t* codes) {
  constexpr int kRuns = kBlock / 64;
  const __m512 by = _mm512_set1_ps(scale), inverse = _mm512_set1_ps(1.0f / scale);
  const bool usual = is_usual(scale);
  __m512 x[kRuns][4];
  __m512i place[kRuns], interval[kRuns];
  __mmask64 upper[kRuns];
  for (int i = 0; i < kBlock / 16; ++i) {
    const __m512 number = _mm512_loadu_ps(numbers + 16 * i);
    // a quotient and its remainder are rounded as a division is, where nothing underflows
    const __m512 near = _mm512_mul_ps(number, inverse);
    x[i / 4][i % 4] = usual ? _mm512_fmadd_ps(_mm512_fnmadd_ps(near, by, number), inverse, near)
                            : _mm512_div_ps(number, by);
  }
  for (int i = 0; i < kRuns; ++i) {
    const __m512i first = cells_of(f, x[i][0], x[i][1]), second = cells_of(f, x[i][2], x[i][3]);
    const __m512i bit = _mm512_set1_epi16(256);
    place[i] = low_bytes_of(first, second);
    upper[i] = _mm512_kunpackd(_mm512_test_epi16_mask(second, bit), _mm512_test_epi16_mask(first, bit));
  }
  for (int i = 0; i < kRuns; ++i) {
    interval[i] = _mm512_mask_blend_epi8(upper[i], look_up(f.cells, place[i]), look_up(f.cells + 256, place[i]));
  }
  for (int i = 0; i < kRuns; ++i) {
    __m512 steps[4];
    __mmask16 beyond[4];
    look_up_floats(f.step_bytes, interval[i], steps);
    for (int j = 0; j < 4; ++j) beyond[j] = _mm512_cmp_ps_mask(x[i][j], steps[j], _CMP_GE_OQ);
    const __mmask64 all =
        _mm512_kunpackd(_mm512_kunpackw(beyond[3], beyond[2]), _mm512_kunpackw(beyond[1], beyond[0]));
    __m512i code = _mm512_mask_sub_epi8(interval[i], all, interval[i], _mm512_set1_epi8(-1));
    if (!f.in_order) code = look_up(f.order, code);
    _mm512_storeu_si512(codes + 64 * i, code);
  }
}

// 64 integers as bytes, those below 0 as 0 and those beyond 255 as 255.
static inline __m512i pack(const __m512i of[4]) {
  const __m512i first = _mm512_packs_epi32(of[0], of[1]), second = _mm512_packs_epi32(of[2], of[3]);
  return _mm512_permutexvar_epi32(order_of_unpacked(), _mm512_packus_epi16(first, second));
}

// The integer nearest to a number within 2^-14 of the root; a negative one for 0 and below.
static inline __m512i root_of(__m512 v) { return _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_rsqrt14_ps(v))); }

// From magnitudes, and from which of the numbers are negative.
static inline __m512i square_codes(const float* numbers, __mmask64 negative, float inverse) {
  const __m512 by = _mm512_set1_ps(ao::optim::kSquares * inverse), quarter = _mm512_set1_ps(0.25f);
  const __m512i middle = _mm512_set1_epi8(127);
  __m512i found[4];
  for (int j = 0; j < 4; ++j) found[j] = root_of(_mm512_fmsub_ps(_mm512_loadu_ps(numbers + 16 * j), by, quarter));
  const __m512i i = pack(found);
  return _mm512_mask_sub_epi8(_mm512_add_epi8(middle, i), negative, middle, i);
}

static inline __m512i fourth_codes(const float* numbers, float inverse) {
  const __m512 by = _mm512_set1_ps(ao::optim::kFourths * inverse), half = _mm512_set1_ps(0.5f);
  const __m512 rest = _mm512_set1_ps(0.75f);
  __m512i found[4];
  for (int j = 0; j < 4; ++j) {
    const __m512 fourth = _mm512_fmadd_ps(_mm512_loadu_ps(numbers + 16 * j), by, half);
    found[j] = root_of(_mm512_fmsub_ps(fourth, _mm512_rsqrt14_ps(fourth), rest));
  }
  return pack(found);
}

static inline __m512i e4m3_codes(const float* numbers, float inverse) {
  const __m512 by = _mm512_set1_ps(inverse);
  const __m512i least = _mm512_set1_epi32(121 << 23), twenty = _mm512_set1_epi32(20 << 23);
  const __m512i sign = _mm512_set1_epi32(0x80), field = _mm512_set1_epi32(0x7f800000);
  __m512i found[4];
  for (int j = 0; j < 4; ++j) {
    const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(numbers + 16 * j), by);
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i power = _mm512_max_epi32(_mm512_and_si512(bits, field), least);
    const __m512i unit = _mm512_add_epi32(power, twenty);
    const __m512 sum = _mm512_add_ps(_mm512_abs_ps(x), _mm512_castsi512_ps(unit));
    const __m512i steps = _mm512_sub_epi32(_mm512_castps_si512(sum), unit);
    const __m512i code = _mm512_add_epi32(_mm512_srli_epi32(_mm512_sub_epi32(power, least), 20), steps);
    found[j] = _mm512_ternarylogic_epi32(code, _mm512_srli_epi32(bits, 24), sign, 0xf8);
  }
  return pack(found);
}

static inline __m512i e5m3_codes(const float* numbers, float inverse) {
  const __m512 by = _mm512_set1_ps(inverse);
  const __m512i half = _mm512_set1_epi32(0x7ffff), least = _mm512_set1_epi32(ao::optim::kLeastE5m3);
  __m512i found[4];
  for (int j = 0; j < 4; ++j) {
    const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(numbers + 16 * j), by));
    found[j] = _mm512_sub_epi32(_mm512_srai_epi32(_mm512_add_epi32(bits, half), 20), least);
  }
  return pack(found);
}

// Takes the signs out of numbers.
static inline void split(float* numbers, uint16_t* negative) {
  for (int i = 0; i < kBlock; i += 16) {
    const __m512 x = _mm512_loadu_ps(numbers + i);
    negative[i / 16] = _mm512_movepi32_mask(_mm512_castps_si512(x));
    _mm512_storeu_ps(numbers + i, _mm512_abs_ps(x));
  }
}

// Codes of the numbers of a block / scale, none of which is NaN.
static inline void encode(const StateFormat& f, Numbers& of, float scale, uint8_t* codes) {
  const bool computed = f.coding != Coding::table && is_usual(scale);
  if (!computed) {
    whole(of);
    return look_up_codes(f, of.values, scale, codes);
  }
  const float inverse = of.unit / scale;
  if (f.coding == Coding::square && !of.is_split) split(of.values, of.negative);
  const auto all = [&](auto some) {
    for (int i = 0; i < kBlock; i += 64) _mm512_storeu_si512(codes + i, some(i));
  };
  if (f.coding == Coding::fourth) return all([&](int i) { return fourth_codes(of.values + i, inverse); });
  if (f.coding == Coding::e4m3) return all([&](int i) { return e4m3_codes(of.values + i, inverse); });
  if (f.coding == Coding::e5m3) return all([&](int i) { return e5m3_codes(of.values + i, inverse); });
  all([&](int i) {
    __mmask64 negative;
    __builtin_memcpy(&negative, of.negative + i / 16, sizeof negative);
    return square_codes(of.values + i, negative, inverse);
  });
}

template <Element kType>
static inline __m512 load(const void* from, int i) {
  if constexpr (kType == Element::f32) return _mm512_loadu_ps(static_cast<const float*>(from) + i);
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(from) + i));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

template <Element kType>
static inline void store(void* to, int i, __m512 v, const uint32_t* noise) {
  if constexpr (kType == Element::f32) return _mm512_storeu_ps(static_cast<float*>(to) + i, v);
  const __m512i bits = _mm512_castps_si512(v);
  __m512i carry;
  if (noise != nullptr) {
    const __mmask16 is_finite = _mm512_fpclass_ps_mask(v, 0x99) ^ 0xffff;
    carry = _mm512_maskz_loadu_epi32(is_finite, noise + i);
  } else {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    carry = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  }
  __m512i rounded = _mm512_add_epi32(bits, carry);
  const __m512i quiet = _mm512_set1_epi32(0x400000);
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), bits, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(to) + i),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// The greater ones of magnitudes; NaN is greater than all numbers.
static inline __m512i greater(__m512i others, __m512 v) { return _mm512_max_epi32(others, _mm512_castps_si512(v)); }

// New moments, and parameters in place. Of companded formats the first ones are in units of `rest1` and split,
// which saves instructions.
template <Element kType, MomentFormat kValues>
static inline void advance(const Adam& a, const Piece& piece, Numbers& new_m, Numbers& new_v) {
  constexpr bool kUnits = kValues == MomentFormat::companded;
  const float unit = kUnits ? __builtin_fabsf(a.rest1) : 1;
  const __m512 keep1 = _mm512_set1_ps(a.beta1 * unit_of<kValues, true>() * piece.m_scale / unit);
  const __m512 keep2 = _mm512_set1_ps(a.beta2 * unit_of<kValues, false>() * piece.v_scale);
  const __m512 rest1 = _mm512_set1_ps(a.rest1 / unit), rest2 = _mm512_set1_ps(a.rest2);
  const __m512 decay = _mm512_set1_ps(a.decay), l2 = _mm512_set1_ps(a.l2), eps = _mm512_set1_ps(a.eps);
  const __m512 unbias = _mm512_set1_ps(a.unbias), rate = _mm512_set1_ps(a.rate * unit);
  const bool has_l2 = bits_of(a.l2) << 1 != 0, turned = a.rest1 < 0;
  __m512i m_greatest = _mm512_setzero_si512(), v_greatest = _mm512_setzero_si512();
  for (int i = 0; i < kBlock; i += 64) {
    __m512 old_m[4], old_v[4];
    decode<kValues, true>(a.m, piece.m_codes + i, old_m);
    decode<kValues, false>(a.v, piece.v_codes + i, old_v);
    for (int j = 0; j < 4; ++j) {
      const int at = i + 16 * j;
      const __m512 p = load<kType>(piece.p, at);
      __m512 g = load<kType>(piece.g, at);
      if (has_l2) g = _mm512_fmadd_ps(l2, p, g);
      const __m512 more = kUnits && !turned ? g : _mm512_mul_ps(rest1, g);
      const __m512 m = _mm512_fmadd_ps(keep1, old_m[j], more), size = _mm512_abs_ps(m);
      const __m512 v = _mm512_fmadd_ps(keep2, old_v[j], _mm512_mul_ps(_mm512_mul_ps(rest2, g), g));
      if (kUnits) new_m.negative[at / 16] = _mm512_movepi32_mask(_mm512_castps_si512(m));
      _mm512_storeu_ps(new_m.values + at, kUnits ? size : m);
      _mm512_storeu_ps(new_v.values + at, v);
      m_greatest = greater(m_greatest, size), v_greatest = greater(v_greatest, _mm512_abs_ps(v));
      const __m512 spread = _mm512_fmadd_ps(_mm512_sqrt_ps(v), unbias, eps);
      const __m512 moved = _mm512_fmsub_ps(decay, p, _mm512_div_ps(_mm512_mul_ps(rate, m), spread));
      store<kType>(piece.p, at, moved, piece.noise);
    }
  }
  new_m.greatest = static_cast<uint32_t>(_mm512_reduce_max_epi32(m_greatest));
  new_v.greatest = static_cast<uint32_t>(_mm512_reduce_max_epi32(v_greatest));
  new_m.unit = unit, new_v.unit = 1, new_m.is_split = kUnits, new_v.is_split = false;
}

template <Element kType>
static inline void advance(const Adam& a, const Piece& piece, Numbers& m, Numbers& v) {
  if (a.values == MomentFormat::companded && is_usual(piece.m_scale) && is_usual(piece.v_scale)) {
    return advance<kType, MomentFormat::companded>(a, piece, m, v);
  }
  return a.values == MomentFormat::halves ? advance<kType, MomentFormat::halves>(a, piece, m, v)
                                    : advance<kType, MomentFormat::any>(a, piece, m, v);
}

}  // namespace ao::AO_ISA::optim
