// Rows of codes on AVX2, turned so that lanes are tokens or elements.
#pragma once

namespace ao::AO_ISA {

// 8 × 8 lanes: lane i of v[j] becomes lane j of v[i].
AO_INLINE void transpose8(__m256i (&v)[8]) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]), t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    v[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]), v[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]), v[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m256i low = v[i], high = v[i + 4];
    v[i] = _mm256_permute2x128_si256(low, high, 0x20), v[i + 4] = _mm256_permute2x128_si256(low, high, 0x31);
  }
}
// Lane i of vector j becomes lane j of vector i.
AO_INLINE void transpose(I (&v)[16]) {
  __m256i part[4][8];  // [quarter]: lanes and vectors below and from 8 on
  for (int i = 0; i < 8; ++i) {
    part[0][i] = v[i].a, part[1][i] = v[i].b, part[2][i] = v[i + 8].a, part[3][i] = v[i + 8].b;
  }
  for (auto& each : part) transpose8(each);
  for (int i = 0; i < 8; ++i) {
    v[i] = {part[0][i], part[2][i]}, v[i + 8] = {part[1][i], part[3][i]};
  }
}
// Byte 16L + 4k + i of each of four rows, to lane 4L + i of vector k.
AO_INLINE void interleave(I (&v)[4]) {
  const I a{_mm256_unpacklo_epi8(v[0].a, v[1].a), _mm256_unpacklo_epi8(v[0].b, v[1].b)};
  const I b{_mm256_unpackhi_epi8(v[0].a, v[1].a), _mm256_unpackhi_epi8(v[0].b, v[1].b)};
  const I c{_mm256_unpacklo_epi8(v[2].a, v[3].a), _mm256_unpacklo_epi8(v[2].b, v[3].b)};
  const I d{_mm256_unpackhi_epi8(v[2].a, v[3].a), _mm256_unpackhi_epi8(v[2].b, v[3].b)};
  v[0] = {_mm256_unpacklo_epi16(a.a, c.a), _mm256_unpacklo_epi16(a.b, c.b)};
  v[1] = {_mm256_unpackhi_epi16(a.a, c.a), _mm256_unpackhi_epi16(a.b, c.b)};
  v[2] = {_mm256_unpacklo_epi16(b.a, d.a), _mm256_unpacklo_epi16(b.b, d.b)};
  v[3] = {_mm256_unpackhi_epi16(b.a, d.a), _mm256_unpackhi_epi16(b.b, d.b)};
}
// The half bytes of 32 bytes, lower ones first, as 64 bytes.
AO_INLINE I spread_nibbles(const uint8_t* p) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i a = _mm256_cvtepu8_epi16(load_half(p)), b = _mm256_cvtepu8_epi16(load_half(p + 16));
  return {_mm256_and_si256(_mm256_or_si256(a, _mm256_slli_epi16(a, 4)), low),
          _mm256_and_si256(_mm256_or_si256(b, _mm256_slli_epi16(b, 4)), low)};
}

// -- codes of tokens as words -------------------------------------------------------------------------------

// The bytes of 32 codes with signs, once they are turned over by `flip`.
AO_INLINE I widen_bytes(const uint8_t* p, I flip) {
  const __m128i turn = _mm256_castsi256_si128(flip.a);
  return {_mm256_cvtepi8_epi16(_mm_xor_si128(load_half(p), turn)),
          _mm256_cvtepi8_epi16(_mm_xor_si128(load_half(p + 16), turn))};
}
// Half bytes in words: lower ones, and upper ones.
AO_INLINE I split_nibbles(__m128i bytes, I flip) {
  const __m256i words = _mm256_cvtepu8_epi16(bytes);
  return xor_({_mm256_and_si256(words, _mm256_set1_epi16(15)), _mm256_srli_epi16(words, 4)}, flip);
}
AO_INLINE I widen_nibbles(const uint8_t* p, I flip) { return split_nibbles(load_half(p), flip); }
// 16 elements of two tokens in pairs.
AO_INLINE I pair_bytes(const uint8_t* p, const uint8_t* q, I flip) {
  const __m128i turn = _mm256_castsi256_si128(flip.a), x = load_half(p), y = load_half(q);
  return {_mm256_cvtepi8_epi16(_mm_xor_si128(_mm_unpacklo_epi8(x, y), turn)),
          _mm256_cvtepi8_epi16(_mm_xor_si128(_mm_unpackhi_epi8(x, y), turn))};
}
// The same from half bytes: elements at even places, then those at odd ones.
AO_INLINE I pair_nibbles(const uint8_t* p, const uint8_t* q, I flip) {
  const auto eight = [](const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); };
  return split_nibbles(_mm_unpacklo_epi8(eight(p), eight(q)), flip);
}
// 8 lanes and 8 others, in turns.
AO_INLINE F in_turns(F v) {
  const __m256 low = _mm256_unpacklo_ps(v.a, v.b), high = _mm256_unpackhi_ps(v.a, v.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
// 32 numbers of two bytes each, the upper one with a sign.
AO_INLINE I join_limbs(const int8_t* low, const int8_t* high) {
  const auto join = [](const int8_t* x, const int8_t* y) {
    return _mm256_add_epi16(_mm256_cvtepi8_epi16(load_half(x)), _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_half(y)), 8));
  };
  return {join(low, high), join(low + 16, high + 16)};
}
// Words at even places of 32, then those at odd ones.
AO_INLINE I even_then_odd(I v) {
  const auto pack = [](__m256i x, __m256i y) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x, y), 0xD8); };
  const I even = shift_right<16>(shift_left<16>(v)), odd = shift_right<16>(v);
  return {pack(even.a, even.b), pack(odd.a, odd.b)};
}
// The sums of the lanes of each of up to four vectors, in a lane each.
template <int kCount>
AO_INLINE __m128i sums_of(const I (&v)[kCount]) {
  __m256i s[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) s[i] = i < kCount ? _mm256_add_epi32(v[i < kCount ? i : 0].a, v[i < kCount ? i : 0].b) : _mm256_setzero_si256();
  const auto both = [](__m256i x, __m256i y) { return _mm256_add_epi32(_mm256_unpacklo_epi32(x, y), _mm256_unpackhi_epi32(x, y)); };
  const __m256i low = both(s[0], s[1]), high = both(s[2], s[3]);
  const __m256i all = _mm256_add_epi32(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
  return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
// Lane r of vector i, plus offset[r], times unit[r], to out[r * stride + i].
template <int kCount>
AO_INLINE void store_turned(const __m128i (&v)[4], const int32_t* offset, const float* unit, float* out, int64_t stride) {
  __m128 x[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x[i] = _mm_castsi128_ps(v[i]);
  _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
    const __m128i sum = _mm_add_epi32(_mm_castps_si128(x[r]), _mm_set1_epi32(offset[r]));
    _mm_storeu_ps(out + r * stride, _mm_mul_ps(_mm_cvtepi32_ps(sum), _mm_set1_ps(unit[r])));
  }
}

}  // namespace ao::AO_ISA
