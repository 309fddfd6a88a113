// Vectors of 16 lanes on AVX2 (with FMA and F16C, and where there is one AVX-VNNI): two registers each.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "../element.h"

#define AO_METHOD inline __attribute__((always_inline))
#define AO_INLINE static AO_METHOD

namespace ao::AO_ISA {

struct F {  // 16 floats, one per row of the block
  __m256 a, b;
};
struct I {  // 16 int32
  __m256i a, b;
};
using Q = I;  // 16 quads of bytes

#define AO_HAS_PAIRS 0
#define AO_HAS_ROW_PAIRS 0
#define AO_HAS_QUARTERS 0
#ifdef __AVXVNNI__
#define AO_HAS_WORDS 1
#define AO_HAS_WORD_SUMS 0
constexpr bool kWideBytes = true;
#else
#define AO_HAS_WORDS 0
#define AO_HAS_WORD_SUMS 1  // products of bytes are words, and their sums take a step of their own
constexpr bool kWideBytes = false;  // products of bytes below 128 are the fast ones
#endif
#define AO_HAS_CODE_WORDS 1  // codes of a token are multiplied in registers as words
#define AO_HAS_LIMBS 1  // products of bytes are faster than decoding, for activations in limbs
#define AO_HAS_BYTE_TABLES 0
constexpr bool kByteShifts = false;
constexpr int kByteBase = 0;        // bytes are unsigned
constexpr int kRegisters = 2;       // that a vector takes
constexpr int kPanelRows = 6;       // 12 of 16 registers for sums
constexpr int kPanelBlocks = 1;

AO_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
AO_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
AO_INLINE void store(float* p, F v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
AO_INLINE F splat(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
AO_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
AO_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
AO_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
AO_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
AO_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
// The second operand where the first is NaN: put the accumulated value second to keep its NaN.
AO_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
AO_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
AO_INLINE I bits_of(F v) { return {_mm256_castps_si256(v.a), _mm256_castps_si256(v.b)}; }
AO_INLINE F as_float(I v) { return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}; }
AO_INLINE I splat_int(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
AO_INLINE I splat_byte(int v) { return splat_int(static_cast<int32_t>(static_cast<uint32_t>(v) * 0x01010101u)); }
AO_INLINE I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
AO_INLINE I subtract(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
AO_INLINE I and_(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
AO_INLINE I or_(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
AO_INLINE I xor_(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
AO_INLINE I max_int(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
AO_INLINE F abs(F v) { return as_float(and_(bits_of(v), splat_int(0x7fffffff))); }
AO_INLINE F to_float(I v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
AO_INLINE I round_to_int(F v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
// Elements 0, 2, 1, 3 of each four: the order in which decoded weights arrive.
AO_INLINE F swap_middle(F v) { return {_mm256_permute_ps(v.a, 0xD8), _mm256_permute_ps(v.b, 0xD8)}; }
// Lane i from lane i ^ kDistance.
template <int kDistance>
AO_INLINE F swap_lanes(F v) {
  if constexpr (kDistance == 1) return {_mm256_permute_ps(v.a, 0xB1), _mm256_permute_ps(v.b, 0xB1)};
  if constexpr (kDistance == 2) return {_mm256_permute_ps(v.a, 0x4E), _mm256_permute_ps(v.b, 0x4E)};
  if constexpr (kDistance == 4) return {_mm256_permute2f128_ps(v.a, v.a, 1), _mm256_permute2f128_ps(v.b, v.b, 1)};
  return {v.b, v.a};
}

template <int kBits>
AO_INLINE I shift_left(I v) {
  return {_mm256_slli_epi32(v.a, kBits), _mm256_slli_epi32(v.b, kBits)};
}
template <int kBits>
AO_INLINE I shift_right(I v) {
  return {_mm256_srai_epi32(v.a, kBits), _mm256_srai_epi32(v.b, kBits)};
}
AO_INLINE I sign_extend_byte(I v) { return shift_right<24>(shift_left<24>(v)); }

AO_INLINE float sum(F v) {
  const __m256 both = _mm256_add_ps(v.a, v.b);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
AO_INLINE int32_t sum_of(I v) {
  const __m256i both = _mm256_add_epi32(v.a, v.b);
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
AO_INLINE int32_t largest(I v) {
  const __m256i both = _mm256_max_epi32(v.a, v.b);
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

// -- memory ------------------------------------------------------------------------------------------------

AO_INLINE __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
AO_INLINE I load_vector(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
AO_INLINE void store_vector(void* p, I v) {
  auto* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, v.a);
  _mm256_storeu_si256(q + 1, v.b);
}
AO_INLINE void store_weight(uint8_t* p, I w) { store_vector(p, w); }
AO_INLINE void store_weight(uint8_t* p, F w) { store_vector(p, bits_of(w)); }
// Into registers at this point: gcc would read a weight from memory again for every row.
template <class V>
AO_INLINE void hold(V& v) {
  asm volatile("" : "+x"(v.a), "+x"(v.b));
}
AO_INLINE void load_weight(I& w, const uint8_t* p) { w = load_vector(p), hold(w); }
AO_INLINE void load_weight(F& w, const uint8_t* p) { w = as_float(load_vector(p)), hold(w); }
AO_INLINE I load_bytes(const uint8_t* p) {
  const __m128i bytes = load_half(p);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
AO_INLINE I load_words(const uint16_t* p) {
  return {_mm256_cvtepu16_epi32(load_half(p)), _mm256_cvtepu16_epi32(load_half(p + 8))};
}
AO_INLINE F half_to_float(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))};
}
// The low 16 bits of 16 integers, which have no others.
AO_INLINE __m256i narrow(I v) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(v.a, v.b), 0xD8); }
// 16 bytes: the low ones of 16 integers.
AO_INLINE void store_bytes(uint8_t* p, I v) {
  const __m256i words = narrow(and_(v, splat_int(255)));
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
// 16 words, beyond their range the nearest.
AO_INLINE void store_words(uint8_t* p, I v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xD8));
}
// 16 codes of float8 e4m3, as float16 with the same bits: value / 256, or NaN.
AO_INLINE F e4m3_as_half(const uint8_t* p) {
  const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_half(p)), 7);  // the sign in bits 14 and 15
  // with 1 more a magnitude reaches bit 14 if it is that of NaN, whose exponent then has all bits
  const __m256i next = _mm256_add_epi16(bits, _mm256_set1_epi16(0x80));
  const __m256i halves = _mm256_xor_si256(bits, _mm256_and_si256(next, _mm256_set1_epi16(0x4000)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

// Up to 16 elements as floats; the lanes beyond `count` are 0.
AO_INLINE F load_as(Element type, const void* p, int count) {
  alignas(32) uint8_t part[64];
  if (count < 16) {
    __builtin_memset(part, 0, 64);
    __builtin_memcpy(part, p, static_cast<size_t>(count * (type == Element::f32 ? 4 : 2)));
    p = part;
  }
  if (type == Element::f32) return load(static_cast<const float*>(p));
  const auto* words = static_cast<const uint16_t*>(p);
  return type == Element::f16 ? half_to_float(words) : as_float(shift_left<16>(load_words(words)));
}

// To bfloat16, ties to even; NaN stays NaN.
AO_INLINE __m256i round_to_bf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 unordered = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(unordered)), 16);
}

AO_INLINE void store_as(Element type, void* p, F v, int count) {
  alignas(32) uint8_t part[64];
  void* to = count < 16 ? part : p;
  if (type == Element::f32) {
    store(static_cast<float*>(to), v);
  } else if (type == Element::f16) {
    auto* halves = static_cast<__m128i*>(to);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(to), narrow({round_to_bf16(v.a), round_to_bf16(v.b)}));
  }
  if (count < 16) __builtin_memcpy(p, part, static_cast<size_t>(count * (type == Element::f32 ? 4 : 2)));
}

// -- products ----------------------------------------------------------------------------------------------

AO_INLINE F splat_float(const uint8_t* p) {
  float v;
  __builtin_memcpy(&v, p, 4);
  return splat(v);
}
AO_INLINE I splat_dword(const void* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return splat_int(v);
}
template <int i>
AO_INLINE Q quad_of(const uint8_t* x) {
  return splat_dword(x + 4 * i);
}
// Products of words, added in pairs; of a byte and its neighbour two away, if these are bytes in words.
AO_INLINE I dot_words(I acc, I x, I y) {
#ifdef __AVXVNNI__
  return {_mm256_dpwssd_avx_epi32(acc.a, x.a, y.a), _mm256_dpwssd_avx_epi32(acc.b, x.b, y.b)};
#else
  return add(acc, {_mm256_madd_epi16(x.a, y.a), _mm256_madd_epi16(x.b, y.b)});
#endif
}
AO_INLINE I multiply_bytes(Q w, Q x) { return {_mm256_maddubs_epi16(w.a, x.a), _mm256_maddubs_epi16(w.b, x.b)}; }
AO_INLINE I add_words(I x, I y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
AO_INLINE I add_pairs(I acc, I words) {
  const __m256i one = _mm256_set1_epi16(1);
  return dot_words(acc, words, {one, one});
}
// `kSmall`: w < 128, so that sums of two products fit 16 bits.
template <bool kSmall>
AO_INLINE I dot_quads(I acc, Q w, Q x) {
#ifdef __AVXVNNI__
  return {_mm256_dpbusd_avx_epi32(acc.a, w.a, x.a), _mm256_dpbusd_avx_epi32(acc.b, w.b, x.b)};
#else
  if constexpr (kSmall) {
    return add_pairs(acc, multiply_bytes(w, x));
  } else {
    const I even = and_(w, splat_int(0x00ff00ff));
    const I odd{_mm256_srli_epi16(w.a, 8), _mm256_srli_epi16(w.b, 8)};
    const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x.a, 8), 8), x_odd = _mm256_srai_epi16(x.a, 8);
    return dot_words(dot_words(acc, even, {x_even, x_even}), odd, {x_odd, x_odd});  // x.a = x.b
  }
#endif
}

// -- two of every four columns -----------------------------------------------------------------------------

// 16 half bytes.
AO_INLINE I load_nibbles(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), low = _mm_set1_epi8(15);
  const __m128i all = _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
  return {_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))};
}
// Columns, of 32, of 16 values whose places within four columns stand in 2 bits each.
AO_INLINE I places_of(const uint8_t* p) {
  const I bits = splat_dword(p);
  const __m256i low = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), high = _mm256_add_epi32(low, _mm256_set1_epi32(16));
  const I places = and_({_mm256_srlv_epi32(bits.a, low), _mm256_srlv_epi32(bits.b, high)}, splat_int(3));
  const __m256i fours = _mm256_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12);
  return or_(places, {fours, _mm256_add_epi32(fours, _mm256_set1_epi32(16))});
}
AO_INLINE F pick(const float* x, I columns) {
  return {_mm256_i32gather_ps(x, columns.a, 4), _mm256_i32gather_ps(x, columns.b, 4)};
}

// -- codes -------------------------------------------------------------------------------------------------

AO_INLINE I shuffle(__m256i order_a, __m256i order_b, I v) {
  return {_mm256_shuffle_epi8(v.a, order_a), _mm256_shuffle_epi8(v.b, order_b)};
}
template <int kShift>
AO_INLINE I shift_words(I v) {
  if constexpr (kShift > 0) return {_mm256_srli_epi16(v.a, kShift), _mm256_srli_epi16(v.b, kShift)};
  if constexpr (kShift < 0) return {_mm256_slli_epi16(v.a, -kShift), _mm256_slli_epi16(v.b, -kShift)};
  return v;
}

// Split: in each 128 bits, that is four rows, bytes 0 and 2 of each row, then bytes 1 and 3.
template <bool kSplit>
AO_INLINE I load_plane(const uint8_t* p) {
  const I plane = load_vector(p);
  if constexpr (!kSplit) return plane;
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  return shuffle(order, order, plane);
}
template <bool kSplit>
AO_INLINE I load_bits(const uint8_t* p) {
  const I rows{_mm256_broadcastsi128_si256(load_half(p)), _mm256_broadcastsi128_si256(load_half(p + 16))};
  if constexpr (kSplit) {
    const __m256i order = _mm256_setr_epi64x(0x0706050403020100, 0x0706050403020100, 0x0f0e0d0c0b0a0908, 0x0f0e0d0c0b0a0908);
    const I twice = shuffle(order, order, rows);
    const __m256i shifts = _mm256_setr_epi64x(0, 4, 0, 4);
    return {_mm256_srlv_epi64(twice.a, shifts), _mm256_srlv_epi64(twice.b, shifts)};
  }
  const __m256i order = _mm256_setr_epi64x(0x0303020201010000, 0x0707060605050404, 0x0b0b0a0a09090808, 0x0f0f0e0e0d0d0c0c);
  const I twice = shuffle(order, order, rows);
  return or_(and_(twice, splat_int(0x000f000f)), and_(shift_words<4>(twice), splat_int(0x0f000f00)));
}
AO_INLINE I even_words(I low, I high) {
  return {_mm256_unpacklo_epi8(low.a, high.a), _mm256_unpacklo_epi8(low.b, high.b)};
}
AO_INLINE I odd_words(I low, I high) {
  return {_mm256_unpackhi_epi8(low.a, high.a), _mm256_unpackhi_epi8(low.b, high.b)};
}
AO_INLINE I even_dwords(I low, I high) {
  const I up = shift_left<16>(high);
  return {_mm256_blend_epi16(low.a, up.a, 0xAA), _mm256_blend_epi16(low.b, up.b, 0xAA)};
}
AO_INLINE I odd_dwords(I low, I high) {
  const I down{_mm256_srli_epi32(low.a, 16), _mm256_srli_epi32(low.b, 16)};
  return {_mm256_blend_epi16(down.a, high.a, 0xAA), _mm256_blend_epi16(down.b, high.b, 0xAA)};
}
template <int kByte>
AO_INLINE I byte_of(Q v) {
  if constexpr (kByte == 0) return and_(v, splat_int(255));
  if constexpr (kByte == 3) return {_mm256_srli_epi32(v.a, 24), _mm256_srli_epi32(v.b, 24)};
  const __m256i order = _mm256_broadcastsi128_si256(_mm_add_epi32(
      _mm_set1_epi32(static_cast<int32_t>(0xffffff00 + kByte)), _mm_setr_epi32(0, 4, 8, 12)));
  return shuffle(order, order, v);
}

// A look-up takes 16 bytes and gives 0 where the top bit of an index is set. So the tables are kept as
// differences (by exclusive or) from the one before: a code adds up those of all tables up to its own.
template <int kSize>
struct Lookup {
  static constexpr int kCount = (kSize + 15) / 16;
  __m256i tables[kCount];

  Lookup() = default;
  AO_METHOD explicit Lookup(const uint8_t* bytes) {
    alignas(16) uint8_t part[16];
    for (int t = 0; t < kCount; ++t) {
      for (int i = 0; i < 16; ++i) {
        const int c = (16 * t + i) % kSize;
        part[i] = static_cast<uint8_t>(t == 0 ? bytes[c] : bytes[c] ^ bytes[c - 16]);
      }
      tables[t] = _mm256_broadcastsi128_si256(load_half(part));
    }
  }
  AO_METHOD I look_up(I codes) const {
    I out{_mm256_shuffle_epi8(tables[0], codes.a), _mm256_shuffle_epi8(tables[0], codes.b)};
#pragma GCC unroll 8
    for (int t = 1; t < kCount; ++t) {
      const __m256i first = _mm256_set1_epi8(static_cast<char>(16 * t));
      const I rest{_mm256_sub_epi8(codes.a, first), _mm256_sub_epi8(codes.b, first)};
      out = xor_(out, {_mm256_shuffle_epi8(tables[t], rest.a), _mm256_shuffle_epi8(tables[t], rest.b)});
    }
    return out;
  }
};

}  // namespace ao::AO_ISA

#include "avx2_rows.h"
#include "planes.h"
#include "avx2_float8.h"
