// Look-ups in tables that fit into registers: the values of codes, and the search for an interval.
#pragma once
#include "numbers.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ao::AO_ISA::coding {

// -- values ------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

// 16 values of codes of at most 6 bits.
template <int kBits>
static inline __m512 values_of(const float* table, __m512i code) {
  const __m512 low = _mm512_loadu_ps(table);
  if constexpr (kBits <= 4) return _mm512_permutexvar_ps(code, low);
  const __m512 first = _mm512_permutex2var_ps(low, code, _mm512_loadu_ps(table + 16));
  if constexpr (kBits <= 5) return first;
  const __m512 second =
      _mm512_permutex2var_ps(_mm512_loadu_ps(table + 32), code, _mm512_loadu_ps(table + 48));
  return _mm512_mask_blend_ps(_mm512_test_epi32_mask(code, _mm512_set1_epi32(32)), first, second);
}

template <int kBits>
static inline void look_up_few(const float* table, const uint8_t* codes, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = static_cast<__mmask16>(count - i < 16 ? (1u << (count - i)) - 1 : 0xffff);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, codes + i));
    _mm512_mask_storeu_ps(out + i, lanes, values_of<kBits>(table, code));
  }
}

static inline void look_up(const float* table, int bits, const uint8_t* codes, int64_t count,
                           float* out) {
  if (bits <= 4) return look_up_few<4>(table, codes, count, out);
  if (bits == 5) return look_up_few<5>(table, codes, count, out);
  if (bits == 6) return look_up_few<6>(table, codes, count, out);
  for (int64_t i = 0; i < count; ++i) out[i] = table[codes[i]];
}

#elif defined(__AVX2__)

static inline void look_up(const float* table, int bits, const uint8_t* codes, int64_t count,
                           float* out) {
  int64_t i = 0;
  if (bits <= 4) {
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    for (; i + 8 <= count; i += 8) {
      const __m256i code =
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
      const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // the sign: bit 3
      _mm256_storeu_ps(out + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code),
                                                 _mm256_permutevar8x32_ps(high, code), upper));
    }
  }
  for (; i < count; ++i) out[i] = table[codes[i]];
}

#else

static inline void look_up(const float* table, int, const uint8_t* codes, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = table[codes[i]];
}

#endif

// -- intervals ---------------------------------------------------------------------------------------
//
// The steps are a balanced search tree, level by level: from node i of a level one goes on to node
// 2i of the next, or to 2i + 1 if the number is not below the step. The last one is the interval.

#if defined(__AVX512F__)

// Steps of nodes of a level that has kNodes of them.
template <int kNodes>
static inline __m512i steps_of(const int32_t* level, __m512i node) {
  const __m512i low = _mm512_loadu_si512(level);
  if constexpr (kNodes <= 16) return _mm512_permutexvar_epi32(node, low);
  if constexpr (kNodes == 32) {
    return _mm512_permutex2var_epi32(low, node, _mm512_loadu_si512(level + 16));
  }
  if constexpr (kNodes > 32) {
    const __mmask16 upper = _mm512_test_epi32_mask(node, _mm512_set1_epi32(kNodes / 2));
    return _mm512_mask_blend_epi32(upper, steps_of<kNodes / 2>(level, node),
                                   steps_of<kNodes / 2>(level + kNodes / 2, node));
  }
}

template <int kBits, int kLevel = 0>
static inline __m512i descend(const int32_t* tree, __m512i key, __m512i node) {
  if constexpr (kLevel == kBits) return node;
  constexpr int kNodes = 1 << kLevel;
  const __mmask16 right = _mm512_cmpge_epi32_mask(key, steps_of<kNodes>(tree + kNodes - 1, node));
  const __m512i twice = _mm512_add_epi32(node, node);
  const __m512i next = _mm512_mask_add_epi32(twice, right, twice, _mm512_set1_epi32(1));
  if constexpr (kLevel < kBits) return descend<kBits, kLevel + 1>(tree, key, next);
}

template <int kBits>
static inline void search(const int32_t* tree, const float* v, int64_t count, uint8_t* intervals) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = static_cast<__mmask16>(count - i < 16 ? (1u << (count - i)) - 1 : 0xffff);
    const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(lanes, v + i));
    const __m512i sign = _mm512_srai_epi32(bits, 31);
    const __m512i flips = _mm512_and_si512(sign, _mm512_set1_epi32(0x7fffffff));
    const __m512i interval =
        descend<kBits>(tree, _mm512_xor_si512(bits, flips), _mm512_setzero_si512());
    _mm512_mask_cvtepi32_storeu_epi8(intervals + i, lanes, interval);
  }
}

#else

// Sixteen numbers side by side.
template <int kBits>
static inline void search(const int32_t* tree, const float* v, int64_t count, uint8_t* intervals) {
  for (int64_t i = 0; i < count; i += 16) {
    const int here = count - i < 16 ? static_cast<int>(count - i) : 16;
    int32_t key[16] = {}, node[16] = {};
    for (int j = 0; j < here; ++j) key[j] = key_of(v[i + j]);
    if constexpr (kBits <= 4) {  // the number of steps that are not above
      for (int s = 0; s < (1 << kBits) - 1; ++s) {
        for (int j = 0; j < 16; ++j) node[j] += key[j] >= tree[s];
      }
    } else {
      for (int level = 0; level < kBits; ++level) {
        const int32_t* steps = tree + (1 << level) - 1;
        for (int j = 0; j < 16; ++j) node[j] = 2 * node[j] + (key[j] >= steps[node[j]]);
      }
    }
    for (int j = 0; j < here; ++j) intervals[i + j] = static_cast<uint8_t>(node[j]);
  }
}

#endif

}  // namespace ao::AO_ISA::coding
