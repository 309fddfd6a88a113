// Bytes of 512 bits moved to any place: the instructions of VBMI, or on processors without it the same from those of
// AVX-512 BW, which tests/cpp/test_moves.cpp compares with loops.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace ao::AO_ISA {

#define AO_BYTES static inline __attribute__((always_inline)) __m512i

#if defined(__AVX512VBMI__)

constexpr bool kHasByteMoves = true;  // each is one instruction

// Byte i of the result: that of `table` at the lower 6 bits of index[i], of both tables at the lower 7.
AO_BYTES bytes_at(__m512i index, __m512i table) { return _mm512_permutexvar_epi8(index, table); }
AO_BYTES bytes_at(__m512i index, __m512i low, __m512i high) { return _mm512_permutex2var_epi8(low, index, high); }
// Byte i of each 64 bits: the 8 bits of v that begin at the lower 6 bits of first[i], round the end.
AO_BYTES bits_from(__m512i first, __m512i v) { return _mm512_multishift_epi64_epi8(first, v); }

#else

constexpr bool kHasByteMoves = false;

// words(index) looks up words, of which each has two bytes of a table.
template <class Words>
AO_BYTES bytes_of_words(__m512i index, const Words& words) {
  // a word for the lower byte of each index, and one for the upper byte; of each one byte is wanted
  const __m512i of_low = words(_mm512_srli_epi16(index, 1)), of_high = words(_mm512_srli_epi16(index, 9));
  const __mmask32 second = _mm512_test_epi16_mask(index, _mm512_set1_epi16(1));
  const __mmask32 first = _mm512_testn_epi16_mask(index, _mm512_set1_epi16(256));
  const __m512i low = _mm512_mask_srli_epi16(of_low, second, of_low, 8);
  const __m512i high = _mm512_mask_slli_epi16(of_high, first, of_high, 8);
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(255), low, high, 0xCA);
}
AO_BYTES bytes_at(__m512i index, __m512i table) {
  return bytes_of_words(index, [&](__m512i at) { return _mm512_permutexvar_epi16(at, table); });
}
AO_BYTES bytes_at(__m512i index, __m512i low, __m512i high) {
  return bytes_of_words(index, [&](__m512i at) { return _mm512_permutex2var_epi16(low, at, high); });
}
// In words: 8 bits, and others above them, that begin at `first`, below 64.
AO_BYTES words_from(__m512i first, __m512i v) {
  const __m512i seven = _mm512_set1_epi16(7), one = _mm512_set1_epi16(1);
  const __m512i low = _mm512_srli_epi16(first, 3), high = _mm512_and_si512(_mm512_add_epi16(low, one), seven);
  // within 128 bits: 8 bytes, and 8 others
  const __m512i half = _mm512_set4_epi32(0x08080808, 0x08080808, 0, 0);
  const __m512i bytes = _mm512_or_si512(_mm512_or_si512(low, _mm512_slli_epi16(high, 8)), half);
  return _mm512_srlv_epi16(_mm512_shuffle_epi8(v, bytes), _mm512_and_si512(first, seven));
}
AO_BYTES bits_from(__m512i first, __m512i v) {
  const __m512i low = words_from(_mm512_and_si512(first, _mm512_set1_epi16(63)), v);
  const __m512i high = words_from(_mm512_and_si512(_mm512_srli_epi16(first, 8), _mm512_set1_epi16(63)), v);
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(255), low, _mm512_slli_epi16(high, 8), 0xCA);
}

#endif

// 64 bytes of a table of 256.
AO_BYTES bytes_at(__m512i index, const __m512i (&table)[4]) {
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), bytes_at(index, table[0], table[1]),
                                bytes_at(index, table[2], table[3]));
}

#undef AO_BYTES

}  // namespace ao::AO_ISA
