// Vectors of 16 lanes on AVX-512 (F, BW, VL, DQ, VNNI, and where there are any VBMI and BF16): one register each.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "../element.h"
#include "bytes512.h"

#define AO_METHOD inline __attribute__((always_inline))
#define AO_INLINE static AO_METHOD

namespace ao::AO_ISA {

using F = __m512;   // 16 floats, one per row of the block
using I = __m512i;  // 16 int32
using P = __m512i;  // 16 pairs of bfloat16
using Q = __m512i;  // 16 quads of bytes

#define AO_HAS_LIMBS 1  // products of bytes at full speed, for activations in limbs
#define AO_HAS_BYTE_TABLES 1  // lookup of bytes by 6 bits
#define AO_HAS_FLOAT_TABLES 1  // lookup of floats by 5 bits; the only set that says so
#ifdef __AVX512BF16__
#define AO_HAS_PAIRS 1  // there is a fast product of bfloat16 pairs
#else
#define AO_HAS_PAIRS 0
#endif
#define AO_HAS_ROW_PAIRS 0
#define AO_HAS_WORDS 1  // there is a product of pairs of 16-bit integers
#define AO_HAS_CODE_WORDS 0
#define AO_HAS_QUARTERS 1  // codes of several tokens are multiplied in registers: there are enough of these
#define AO_HAS_WORD_SUMS 0
constexpr bool kWideBytes = true;  // products of bytes take codes of all 8 bits at full speed
constexpr int kByteBase = 0;       // bytes are unsigned
constexpr int kRegisters = 1;      // that a vector takes
constexpr int kPanelRows = 7;  // rows of activations x 2 blocks of columns fill the registers
constexpr int kPanelBlocks = 2;

AO_INLINE F zero() { return _mm512_setzero_ps(); }
AO_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
AO_INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
AO_INLINE F splat(float v) { return _mm512_set1_ps(v); }
AO_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
AO_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
AO_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
AO_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
AO_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand where the first is NaN: put the accumulated value second to keep its NaN.
AO_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
AO_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
AO_INLINE F abs(F a) { return _mm512_abs_ps(a); }
AO_INLINE float sum(F a) { return _mm512_reduce_add_ps(a); }
AO_INLINE float greatest_lane(F a) { return _mm512_reduce_max_ps(a); }
AO_INLINE I splat_int(int32_t v) { return _mm512_set1_epi32(v); }
AO_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
AO_INLINE I subtract(I a, I b) { return _mm512_sub_epi32(a, b); }
AO_INLINE int32_t sum_of(I a) { return _mm512_reduce_add_epi32(a); }
AO_INLINE int32_t largest(I a) { return _mm512_reduce_max_epi32(a); }
AO_INLINE I sign_extend_byte(I a) { return _mm512_srai_epi32(_mm512_slli_epi32(a, 24), 24); }
AO_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
AO_INLINE I round_to_int(F a) { return _mm512_cvtps_epi32(a); }
AO_INLINE F nearest(F a) { return _mm512_roundscale_ps(a, 0); }
AO_INLINE F times_power(F a, F exponent) { return _mm512_scalef_ps(a, exponent); }  // of whole numbers
// The greater of two magnitudes.
AO_INLINE F greater_magnitude(F a, F b) { return _mm512_range_ps(a, b, 11); }
// A float's magnitude times the power of two that brings it to 1 … 2, and of 32 floats that for the lowest 5 bits of
// its exponent.
AO_INLINE F mantissa_of(F a) {
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(  // (a & b) | c
      _mm512_castps_si512(a), _mm512_set1_epi32(0x7fffff), _mm512_set1_epi32(0x3f800000), 0xea));
}
AO_INLINE F of_exponent(F low, F high, F a) {
  return _mm512_permutex2var_ps(low, _mm512_srli_epi32(_mm512_castps_si512(a), 23), high);
}
AO_INLINE I bits_of(F a) { return _mm512_castps_si512(a); }
AO_INLINE F as_float(I a) { return _mm512_castsi512_ps(a); }
AO_INLINE I and_(I a, I b) { return _mm512_and_si512(a, b); }
AO_INLINE I xor_(I a, I b) { return _mm512_xor_si512(a, b); }
AO_INLINE I max_int(I a, I b) { return _mm512_max_epi32(a, b); }
AO_INLINE I or_(I a, I b) { return _mm512_or_si512(a, b); }
// Elements 0, 2, 1, 3 of each four: the order in which decoded weights arrive.
AO_INLINE F swap_middle(F a) { return _mm512_permute_ps(a, 0xD8); }
// Lane i from lane i ^ kDistance.
template <int kDistance>
AO_INLINE F swap_lanes(F a) {
  if constexpr (kDistance == 1) return _mm512_permute_ps(a, 0xB1);
  if constexpr (kDistance == 2) return _mm512_permute_ps(a, 0x4E);
  if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(a, a, 0xB1);
  return _mm512_shuffle_f32x4(a, a, 0x4E);
}

AO_INLINE __mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1); }

// Up to 16 elements as floats; the lanes beyond `count` are 0.
AO_INLINE F load_as(Element type, const void* p, int count) {
  const __mmask16 mask = count >= 16 ? 0xffff : first(count);
  if (type == Element::f32) return _mm512_maskz_loadu_ps(mask, p);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, p);
  if (type == Element::f16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// In bfloat16, as 16 words. The instruction for it takes subnormal numbers for 0.
AO_INLINE __m256i round_to_bf16(F v) {
  const I bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const I rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 none = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);  // NaN stays one
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, none, _mm512_set1_epi32(0x7fc00000)), 16));
}
AO_INLINE void store_as(Element type, void* p, F v, int count) {
  const __mmask16 mask = count >= 16 ? 0xffff : first(count);
  if (type == Element::f32) return _mm512_mask_storeu_ps(p, mask, v);
  const __m256i half = type == Element::f16
                           ? _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)
                           : round_to_bf16(v);
  _mm256_mask_storeu_epi16(p, mask, half);
}

// 16 bytes: the low ones of 16 integers.
AO_INLINE void store_bytes(uint8_t* p, I v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}
// 16 words, beyond their range the nearest.
AO_INLINE void store_words(uint8_t* p, I v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(v));
}
// 16 bfloat16 of floats that are exact in it.
AO_INLINE void store_exact_bf16(uint8_t* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16)));
}
AO_INLINE I load_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
AO_INLINE I load_words(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// 16 codes of float8 e4m3, as float16 with the same bits: value / 256, or NaN.
AO_INLINE F e4m3_as_half(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);  // the sign in bits 14 and 15
  // with 1 more a magnitude reaches bit 14 if it is that of NaN, whose exponent then has all bits
  const __m256i next = _mm256_add_epi16(bits, _mm256_set1_epi16(0x80)), top = _mm256_set1_epi16(0x4000);
  return _mm512_cvtph_ps(_mm256_ternarylogic_epi32(bits, next, top, 0x78));  // bits ^ (next & top)
}
AO_INLINE F half_to_float(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <int kBits>
AO_INLINE I shift_right(I v) {
  return _mm512_srai_epi32(v, kBits);
}
template <int kBits>
AO_INLINE I shift_left(I v) {
  return _mm512_slli_epi32(v, kBits);
}

// -- products ----------------------------------------------------------------------------------------

AO_INLINE P load_vector(const void* p) { return _mm512_loadu_si512(p); }
AO_INLINE void store_vector(void* p, I v) { _mm512_storeu_si512(p, v); }
AO_INLINE void store_weight(uint8_t* p, I w) { _mm512_storeu_si512(p, w); }
AO_INLINE void store_weight(uint8_t* p, F w) { _mm512_storeu_ps(p, w); }
AO_INLINE void load_weight(I& w, const uint8_t* p) { w = load_vector(p); }
AO_INLINE void load_weight(F& w, const uint8_t* p) { w = _mm512_loadu_ps(p); }
AO_INLINE F splat_float(const uint8_t* p) {
  float v;
  __builtin_memcpy(&v, p, 4);
  return _mm512_set1_ps(v);
}
AO_INLINE I splat_dword(const void* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}
template <int i>
AO_INLINE Q quad_of(const uint8_t* x) {
  return splat_dword(x + 4 * i);
}
AO_INLINE F low_halves(P v) { return as_float(_mm512_slli_epi32(v, 16)); }
AO_INLINE F high_halves(P v) { return as_float(and_(v, splat_int(static_cast<int>(0xffff0000)))); }
AO_INLINE F dot_pairs(F acc, P w, P x) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
#else
  return fma(low_halves(w), low_halves(x), fma(high_halves(w), high_halves(x), acc));
#endif
}
// 32 bfloat16 in order, rounded.
AO_INLINE P join_bf16(F low, F high) {
#ifdef __AVX512BF16__
  return reinterpret_cast<P>(_mm512_cvtne2ps_pbh(high, low));
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(round_to_bf16(low)), round_to_bf16(high), 1);
#endif
}
AO_INLINE I dot_words(I acc, I w, I x) { return _mm512_dpwssd_epi32(acc, w, x); }
AO_INLINE I add_words(I a, I b) { return _mm512_add_epi16(a, b); }
template <bool>
AO_INLINE I dot_quads(I acc, Q w_unsigned, Q x_signed) {
  return _mm512_dpbusd_epi32(acc, w_unsigned, x_signed);
}

// -- two of every four columns ---------------------------------------------------------------------------

// 16 half bytes.
AO_INLINE I load_nibbles(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), low = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(bytes, low), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
  return _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(even, odd));
}
// Columns, of 32, of 16 values whose places within four columns stand in 2 bits each.
AO_INLINE I places_of(const uint8_t* p) {
  const I shifts = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const I fours = _mm512_set_epi32(28, 28, 24, 24, 20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);
  return or_(and_(_mm512_srlv_epi32(splat_dword(p), shifts), splat_int(3)), fours);
}
AO_INLINE F pick(const float* x, I columns) { return _mm512_permutex2var_ps(load(x), columns, load(x + 16)); }
// The same of 32 values and 64 columns, in halves of lanes.
AO_INLINE P pair_places_of(const uint8_t* p) {
  int64_t bits;
  __builtin_memcpy(&bits, p, 8);
  // words of 8 bits that begin at every second one
  const I starts = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                    22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const I fours = _mm512_set_epi16(60, 60, 56, 56, 52, 52, 48, 48, 44, 44, 40, 40, 36, 36, 32, 32, 28, 28, 24, 24,
                                   20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);
  const I places = bits_from(starts, _mm512_set1_epi64(bits));
  return or_(and_(places, _mm512_set1_epi16(3)), fours);
}
AO_INLINE P pick_pairs(const uint8_t* x, P columns) {
  return _mm512_permutex2var_epi16(load_vector(x), columns, load_vector(x + 64));
}

// -- rows of codes ---------------------------------------------------------------------------------------

// Lane i of vector j becomes lane j of vector i.
AO_INLINE void transpose(I (&v)[16]) {
  I t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // 128 bits of four vectors each
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88), v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
// Byte 16L + 4k + i of each of four rows, to lane 4L + i of vector k.
AO_INLINE void interleave(I (&v)[4]) {
  const I a = _mm512_unpacklo_epi8(v[0], v[1]), b = _mm512_unpackhi_epi8(v[0], v[1]);
  const I c = _mm512_unpacklo_epi8(v[2], v[3]), d = _mm512_unpackhi_epi8(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi16(a, c), v[1] = _mm512_unpackhi_epi16(a, c);
  v[2] = _mm512_unpacklo_epi16(b, d), v[3] = _mm512_unpackhi_epi16(b, d);
}
// Four rows of 32 bytes of half bytes, 16 of each row: byte 16L + 8 * kHalf + 4h + i, the lower half to lane
// 4 (L + 2h) + i of `low`.
template <int kHalf>
AO_INLINE void interleave_nibbles(const uint8_t* const (&p)[4], I& low, I& high) {
  __m256i v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p[i]));
  const __m256i a = kHalf ? _mm256_unpackhi_epi8(v[0], v[1]) : _mm256_unpacklo_epi8(v[0], v[1]);
  const __m256i b = kHalf ? _mm256_unpackhi_epi8(v[2], v[3]) : _mm256_unpacklo_epi8(v[2], v[3]);
  const I all = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_unpacklo_epi16(a, b)), _mm256_unpackhi_epi16(a, b), 1);
  low = _mm512_and_si512(all, _mm512_set1_epi8(15));
  high = _mm512_and_si512(_mm512_srli_epi16(all, 4), _mm512_set1_epi8(15));
}
// The same rows, 64 half bytes of each: lane 4c + t of vectors 2m and 2m + 1 has the lower and the upper halves of 4
// bytes of row t, from 8m + 16 (c % 2) + 4 (c / 2) on.
AO_INLINE void quarters_of_nibbles(const uint8_t* const* p, I (&v)[4]) {
  __m256i x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p[i]));
  const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
  const __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
  const auto join = [](__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); };
  const I first = join(_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c));
  const I second = join(_mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d));
  const I low = _mm512_set1_epi8(15);
  v[0] = _mm512_and_si512(first, low), v[1] = _mm512_and_si512(_mm512_srli_epi16(first, 4), low);
  v[2] = _mm512_and_si512(second, low), v[3] = _mm512_and_si512(_mm512_srli_epi16(second, 4), low);
}
// Bytes of a row of 64 where lane 4c + k has those that meet quarter c of vector k of `quarters_of_nibbles`.
AO_INLINE I for_nibbles(I row) {
  alignas(64) static constexpr auto places = [] {
    struct {
      uint8_t of[64];
    } made{};
    for (int c = 0; c < 4; ++c) {
      for (int k = 0; k < 4; ++k) {
        for (int i = 0; i < 4; ++i) {
          made.of[16 * c + 4 * k + i] = static_cast<uint8_t>(2 * (8 * (k / 2) + 16 * (c % 2) + 4 * (c / 2) + i) + k % 2);
        }
      }
    }
    return made;
  }();
  return bytes_at(_mm512_load_si512(places.of), row);
}
// In a register from here on: compilers would load it again for each product, and one load takes as long as one.
AO_INLINE I in_register(I v) {
#ifndef __clang__  // some of its versions refuse 64 bytes here
  asm("" : "+v"(v));
#endif
  return v;
}
// As `interleave`, but vectors 2 * kHalf and 2 * kHalf + 1 alone.
template <int kHalf>
AO_INLINE void interleave_half(const I (&v)[4], I (&out)[2]) {
  const I a = kHalf ? _mm512_unpackhi_epi8(v[0], v[1]) : _mm512_unpacklo_epi8(v[0], v[1]);
  const I b = kHalf ? _mm512_unpackhi_epi8(v[2], v[3]) : _mm512_unpacklo_epi8(v[2], v[3]);
  out[0] = _mm512_unpacklo_epi16(a, b), out[1] = _mm512_unpackhi_epi16(a, b);
}
// Within quarters of 128 bits: lane i of vector j becomes lane j of vector i.
AO_INLINE void transpose_quarters(I (&v)[4]) {
  const I a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const I c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi64(a, c), v[1] = _mm512_unpackhi_epi64(a, c);
  v[2] = _mm512_unpacklo_epi64(b, d), v[3] = _mm512_unpackhi_epi64(b, d);
}
// The sum of the quarters of each of four vectors, as quarters of one.
AO_INLINE I sum_quarters(const I (&v)[4]) {
  const I a = _mm512_add_epi32(_mm512_shuffle_i32x4(v[0], v[1], 0x88), _mm512_shuffle_i32x4(v[0], v[1], 0xdd));
  const I b = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2], v[3], 0x88), _mm512_shuffle_i32x4(v[2], v[3], 0xdd));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}
AO_INLINE F sum_quarters(const F (&v)[4]) {
  const F a = add(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
  const F b = add(_mm512_shuffle_f32x4(v[2], v[3], 0x88), _mm512_shuffle_f32x4(v[2], v[3], 0xdd));
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
// Quarter i of `v` to out + i * stride, for i below kCount.
template <int kCount>
AO_INLINE void store_quarters(float* out, int64_t stride, F v) {
  _mm_storeu_ps(out, _mm512_castps512_ps128(v));
  if constexpr (kCount > 1) _mm_storeu_ps(out + stride, _mm512_extractf32x4_ps(v, 1));
  if constexpr (kCount > 2) _mm_storeu_ps(out + 2 * stride, _mm512_extractf32x4_ps(v, 2));
  if constexpr (kCount > 3) _mm_storeu_ps(out + 3 * stride, _mm512_extractf32x4_ps(v, 3));
}
// Four numbers, each in all lanes of a quarter.
AO_INLINE F splat_quarters(const float* p) {
  const I places = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return _mm512_permutexvar_ps(places, _mm512_castps128_ps512(_mm_loadu_ps(p)));
}
// Lane k of each quarter in all its lanes.
template <int k>
AO_INLINE I splat_lane(I v) {
  return _mm512_shuffle_epi32(v, static_cast<_MM_PERM_ENUM>(k * 0x55));
}
// Quarters 0 and 2, or 1 and 3, of two vectors.
template <int kOdd>
AO_INLINE I every_second_quarter(I a, I b) {
  return _mm512_shuffle_i32x4(a, b, kOdd ? 0xdd : 0x88);
}
// Pairs of words: those at the same place of two vectors of 32 words.
AO_INLINE void pair_words(I a, I b, I (&out)[2]) {
  const I low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                 35, 3, 34, 2, 33, 1, 32, 0);
  out[0] = _mm512_permutex2var_epi16(a, low, b);
  out[1] = _mm512_permutex2var_epi16(a, or_(low, _mm512_set1_epi16(16)), b);
}
// Bytes whose top bit is a sign, looked up by the others as the low and the high byte of a bfloat16.
struct SignedTable {
  I low[2], high[2];
  AO_METHOD explicit SignedTable(const uint8_t* bytes)
      : low{_mm512_loadu_si512(bytes), _mm512_loadu_si512(bytes + 64)},
        high{_mm512_loadu_si512(bytes + 128), _mm512_loadu_si512(bytes + 192)} {}
  AO_METHOD void look_up(I codes, I& lower, I& upper) const {
    lower = bytes_at(codes, low[0], low[1]);
    const I magnitude = bytes_at(codes, high[0], high[1]);
    upper = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(-128), 0xf8);  // a | (b & c)
  }
};
AO_INLINE I join_bytes_low(I low, I high) { return _mm512_unpacklo_epi8(low, high); }
AO_INLINE I join_bytes_high(I low, I high) { return _mm512_unpackhi_epi8(low, high); }
// The half bytes of 32 bytes, lower ones first, as 64 bytes.
AO_INLINE I spread_nibbles(const uint8_t* p) {
  const I words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_ternarylogic_epi32(words, _mm512_slli_epi16(words, 4), _mm512_set1_epi8(15), 0xa8);  // (a | b) & c
}

}  // namespace ao::AO_ISA

#include "avx512_codes.h"
