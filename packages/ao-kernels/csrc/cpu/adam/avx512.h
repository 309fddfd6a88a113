// Blocks of moments on AVX-512 with VBMI: tables of 256 codes are looked up in registers, 64 at a time.
#pragma once
#include <immintrin.h>

#include "numbers.h"

namespace ao::AO_ISA::optim {

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
  const __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), index, _mm512_loadu_si512(table + 64));
  const __m512i high =
      _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), index, _mm512_loadu_si512(table + 192));
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
}

// 64 floats of a table of 256, which is stored by bytes.
static inline void look_up_floats(const uint8_t (*table)[256], __m512i index, __m512 out[4]) {
  // groups of 4 go where the unpacking of bytes to floats brings them back from
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  index = _mm512_permutexvar_epi32(order, index);
  const __m512i a = look_up(table[0], index), b = look_up(table[1], index);
  const __m512i c = look_up(table[2], index), d = look_up(table[3], index);
  const __m512i ab = _mm512_unpacklo_epi8(a, b), ab2 = _mm512_unpackhi_epi8(a, b);
  const __m512i cd = _mm512_unpacklo_epi8(c, d), cd2 = _mm512_unpackhi_epi8(c, d);
  out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab, cd));
  out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab, cd));
  out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(ab2, cd2));
  out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(ab2, cd2));
}

static inline void decode(const StateFormat& f, const uint8_t* codes, float scale, float* out) {
  const __m512 by = _mm512_set1_ps(scale);
  for (int i = 0; i < kBlock; i += 64) {
    __m512 found[4];
    look_up_floats(f.values, _mm512_loadu_si512(codes + i), found);
    for (int j = 0; j < 4; ++j) _mm512_storeu_ps(out + i + 16 * j, _mm512_mul_ps(found[j], by));
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

// Codes of the numbers of a block / scale, none of which is NaN. In phases, whose short chains overlap.
static inline void encode(const StateFormat& f, const float* numbers, float scale, uint8_t* codes) {
  alignas(64) static constexpr auto kEven = every_second<uint8_t, 0>();
  constexpr int kRuns = kBlock / 64;
  const __m512 by = _mm512_set1_ps(scale), inverse = _mm512_set1_ps(1.0f / scale);
  const bool is_usual = scale > 0x1p-80f && scale < 0x1p100f;
  __m512 x[kRuns][4];
  __m512i place[kRuns], interval[kRuns];
  __mmask64 upper[kRuns];
  for (int i = 0; i < kBlock / 16; ++i) {
    const __m512 number = _mm512_loadu_ps(numbers + 16 * i);
    // a quotient and its remainder are rounded as a division is, where nothing underflows
    const __m512 near = _mm512_mul_ps(number, inverse);
    x[i / 4][i % 4] = is_usual ? _mm512_fmadd_ps(_mm512_fnmadd_ps(near, by, number), inverse, near)
                               : _mm512_div_ps(number, by);
  }
  for (int i = 0; i < kRuns; ++i) {
    const __m512i first = cells_of(f, x[i][0], x[i][1]), second = cells_of(f, x[i][2], x[i][3]);
    const __m512i bit = _mm512_set1_epi16(256);
    place[i] = _mm512_permutex2var_epi8(first, _mm512_load_si512(kEven.index), second);
    upper[i] = _mm512_kunpackd(_mm512_test_epi16_mask(second, bit), _mm512_test_epi16_mask(first, bit));
  }
  for (int i = 0; i < kRuns; ++i) {
    interval[i] = _mm512_mask_blend_epi8(upper[i], look_up(f.cells, place[i]), look_up(f.cells + 256, place[i]));
  }
  for (int i = 0; i < kRuns; ++i) {
    __m512 steps[4];
    __mmask16 beyond[4];
    look_up_floats(f.steps, interval[i], steps);
    for (int j = 0; j < 4; ++j) beyond[j] = _mm512_cmp_ps_mask(x[i][j], steps[j], _CMP_GE_OQ);
    const __mmask64 all =
        _mm512_kunpackd(_mm512_kunpackw(beyond[3], beyond[2]), _mm512_kunpackw(beyond[1], beyond[0]));
    __m512i code = _mm512_mask_sub_epi8(interval[i], all, interval[i], _mm512_set1_epi8(-1));
    if (!f.in_order) code = look_up(f.order, code);
    _mm512_storeu_si512(codes + 64 * i, code);
  }
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

// New moments, and parameters in place.
template <Element kType>
static inline Greatest advance(const Adam& a, const Piece& piece) {
  const __m512 beta1 = _mm512_set1_ps(a.beta1), rest1 = _mm512_set1_ps(a.rest1);
  const __m512 beta2 = _mm512_set1_ps(a.beta2), rest2 = _mm512_set1_ps(a.rest2);
  const __m512 decay = _mm512_set1_ps(a.decay), l2 = _mm512_set1_ps(a.l2), unbias = _mm512_set1_ps(a.unbias);
  const __m512 eps = _mm512_set1_ps(a.eps), rate = _mm512_set1_ps(a.rate);
  const __m512i sign = _mm512_set1_epi32(a.maximize ? INT32_MIN : 0), magnitude = _mm512_set1_epi32(INT32_MAX);
  const bool has_l2 = a.l2 != 0;
  __m512i m_greatest = _mm512_setzero_si512(), v_greatest = _mm512_setzero_si512();
  decode(a.m, piece.m_codes, piece.m_scale, piece.m);
  decode(a.v, piece.v_codes, piece.v_scale, piece.v);
  for (int i = 0; i < kBlock; i += 16) {
    const __m512 p = load<kType>(piece.p, i);
    __m512 g = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(load<kType>(piece.g, i)), sign));
    if (has_l2) g = _mm512_add_ps(g, _mm512_mul_ps(l2, p));
    const __m512 old_m = _mm512_loadu_ps(piece.m + i), old_v = _mm512_loadu_ps(piece.v + i);
    const __m512 new_m = _mm512_add_ps(_mm512_mul_ps(beta1, old_m), _mm512_mul_ps(rest1, g));
    const __m512 square = _mm512_mul_ps(_mm512_mul_ps(rest2, g), g);
    const __m512 new_v = _mm512_add_ps(_mm512_mul_ps(beta2, old_v), square);
    _mm512_storeu_ps(piece.m + i, new_m);
    _mm512_storeu_ps(piece.v + i, new_v);
    m_greatest = _mm512_max_epi32(m_greatest, _mm512_and_si512(_mm512_castps_si512(new_m), magnitude));
    v_greatest = _mm512_max_epi32(v_greatest, _mm512_and_si512(_mm512_castps_si512(new_v), magnitude));
    const __m512 root = _mm512_add_ps(_mm512_mul_ps(_mm512_sqrt_ps(new_v), unbias), eps);
    const __m512 change = _mm512_mul_ps(rate, _mm512_div_ps(new_m, root));
    store<kType>(piece.p, i, _mm512_sub_ps(_mm512_mul_ps(decay, p), change), piece.noise);
  }
  return {static_cast<uint32_t>(_mm512_reduce_max_epi32(m_greatest)),
          static_cast<uint32_t>(_mm512_reduce_max_epi32(v_greatest))};
}

}  // namespace ao::AO_ISA::optim
