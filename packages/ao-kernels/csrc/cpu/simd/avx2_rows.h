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

}  // namespace ao::AO_ISA
