// 64-bit ARM with products of matrices of 2 rows, in bytes (FEAT_I8MM) and in bfloat16 (FEAT_BF16).
#pragma once
#include "neon_lanes.h"

#define AO_HAS_PAIRS 1        // there is a fast product of bfloat16 pairs
#define AO_HAS_ROW_PAIRS 1    // two rows of activations are multiplied at a time
#define AO_HAS_BYTE_TABLES 1  // look-ups of bytes by 6 bits

namespace ao::AO_ISA {

constexpr bool kWideBytes = true;  // products of bytes take all 8 bits at full speed
constexpr int kByteBase = 0;       // bytes are unsigned

template <bool>
AO_INLINE i4 dot4(i4 acc, i4 w, i4 x) {
  return vusdotq_s32(acc, as_bytes(w), vreinterpretq_s8_s32(x));
}
template <bool, int i>
AO_INLINE I dot_quads(I acc, Q w, Lane<i> x) {
  const auto dot = [x](i4 sum, i4 bytes) -> i4 { return vusdotq_laneq_s32(sum, as_bytes(bytes), x.row, i); };
  return each<I>(dot, acc, w);
}

// -- two rows of activations at a time ---------------------------------------------------------------------
//
// A register holds 8 bytes, or 4 numbers in bfloat16, of two rows: of the weight, that is two lanes of one vector and of
// the next one, alternately; or of the activations. Their product is that of each of both with each of both: sums of a
// weight's row with both rows of the activations, alternately. So vectors of weights, and sums of two rows, go zipped.

template <class V>
AO_INLINE void zip4(V& p, V& q) {
  const i4 x = (i4)p, y = (i4)q;
  p = (V)(i4)vzip1q_s32(x, y), q = (V)(i4)vzip2q_s32(x, y);
}
template <class V>
AO_INLINE void unzip4(V& p, V& q) {
  const i4 x = (i4)p, y = (i4)q;
  p = (V)(i4)vuzp1q_s32(x, y), q = (V)(i4)vuzp2q_s32(x, y);
}
template <class V>
AO_INLINE void zip_lanes(V& p, V& q) {
  zip4(p.a, q.a), zip4(p.b, q.b), zip4(p.c, q.c), zip4(p.d, q.d);
}
template <class V>
AO_INLINE void unzip_lanes(V& p, V& q) {
  unzip4(p.a, q.a), unzip4(p.b, q.b), unzip4(p.c, q.c), unzip4(p.d, q.d);
}

AO_INLINE i4 load_held(const uint8_t* p) { return held(load_bytes_as<i4>(p)); }
// 8 bytes of two rows.
AO_INLINE i4 two_rows(const uint8_t* first, const uint8_t* second) {
  return from_bytes(vcombine_u8(vld1_u8(first), vld1_u8(second)));
}
AO_INLINE i4 dot_rows(i4 sums, i4 w, i4 x) { return vusmmlaq_s32(sums, as_bytes(w), vreinterpretq_s8_s32(x)); }
AO_INLINE f4 dot_rows(f4 sums, i4 w, i4 x) {
  return vbfmmlaq_f32(sums, vreinterpretq_bf16_s32(w), vreinterpretq_bf16_s32(x));
}

// Lanes 4k to 4k + 3.
template <int k, class V>
AO_INLINE auto& quarter(V& v) {
  if constexpr (k == 0) return v.a;
  if constexpr (k == 1) return v.b;
  if constexpr (k == 2) return v.c;
  if constexpr (k == 3) return v.d;
}

}  // namespace ao::AO_ISA

#include "neon_tables.h"
#include "neon_bf16.h"
