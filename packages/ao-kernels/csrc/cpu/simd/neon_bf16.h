// Pairs of bfloat16 in each lane, for 64-bit ARM with FEAT_BF16. Included by neon_i8mm.h.
//
// Its products take subnormal numbers for 0, and round sums to odd: the nearest number or the other one next to it, of
// both that with the last bit set. So sums have up to twice the error of those in float32, and none to one side.
#pragma once
#include "planes.h"

namespace ao::AO_ISA {

using P = I;  // 16 pairs of bfloat16

AO_INLINE F dot_pairs(F acc, P w, P x) {
  const auto dot = [](f4 sum, i4 p, i4 q) -> f4 {
    return vbfdotq_f32(sum, vreinterpretq_bf16_s32(p), vreinterpretq_bf16_s32(q));
  };
  return each<F>(dot, acc, w, x);
}
AO_INLINE F low_halves(P v) { return as_float(shift_left<16>(v)); }
AO_INLINE F high_halves(P v) { return as_float(and_(v, splat_int(static_cast<int32_t>(0xffff0000)))); }

// Pairs of floats that are exact in bfloat16.
AO_INLINE P pair_exact(F low, F high) {
  return each<P>([](f4 p, f4 q) -> i4 { return vsriq_n_s32((i4)q, (i4)p, 16); }, low, high);
}
AO_INLINE P pair_rounded(F low, F high) {
  const auto round = [](f4 v) { return vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(v)); };
  return each<P>([round](f4 p, f4 q) -> i4 { return from_words(vzip1q_u16(round(p), round(q))); }, low, high);
}
// 16 numbers that are exact in bfloat16, in order.
AO_INLINE void store_exact_bf16(uint8_t* p, F v) {
  const auto upper = [](f4 low, f4 high) -> i4 {
    return from_words(vuzp2q_u16(as_words((i4)low), as_words((i4)high)));
  };
  const i4 first = upper(v.a, v.b), second = upper(v.c, v.d);
  __builtin_memcpy(p, &first, 16);
  __builtin_memcpy(p + 16, &second, 16);
}

AO_INLINE uint16_t nearest_bf16(float v) {
  uint32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
AO_INLINE float from_bf16(uint16_t word) {
  const uint32_t bits = static_cast<uint32_t>(word) << 16;
  float v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}

// Values as pairs: columns (4i, 4i + 2) and (4i + 1, 4i + 3).
template <int kBits, Kind kKind>
struct PairDecoder : FloatDecoder<kBits, kKind> {
  AO_METHOD explicit PairDecoder(const float* values) : FloatDecoder<kBits, kKind>(values) {}

  template <int i>
  AO_METHOD void pairs(const uint8_t* tile, P out[2]) const {
    if constexpr (in_planes(kBits, kKind)) {
      this->template words<i>(tile, out);
    } else {
      F all[4];
      this->template floats<i>(tile, all);
      if constexpr (kKind == Kind::integer) out[0] = pair_exact(all[0], all[1]), out[1] = pair_exact(all[2], all[3]);
      if constexpr (kKind == Kind::table) out[0] = pair_rounded(all[0], all[1]), out[1] = pair_rounded(all[2], all[3]);
    }
  }
  // What `pairs` leaves of the values of a table.
  template <int i>
  AO_METHOD void low_pairs(const uint8_t* tile, P out[2]) const {
    F all[4];
    this->template floats<i>(tile, all);
    P near[2] = {pair_rounded(all[0], all[1]), pair_rounded(all[2], all[3])};
    out[0] = pair_rounded(sub(all[0], low_halves(near[0])), sub(all[1], high_halves(near[0])));
    out[1] = pair_rounded(sub(all[2], low_halves(near[1])), sub(all[3], high_halves(near[1])));
  }
};

// A table of few values, and what bfloat16 leaves of them, in look-ups of bytes.
template <int kBits>
  requires(kBits <= 6)
struct PairDecoder<kBits, Kind::table> : FloatDecoder<kBits, Kind::table> {
  static constexpr int kSize = 1 << kBits;
  Lookup<kSize> near[2], rest[2];

  AO_METHOD explicit PairDecoder(const float* values) : FloatDecoder<kBits, Kind::table>(values) {
    uint8_t bytes[4][kSize];
    for (int c = 0; c < kSize; ++c) {
      const uint16_t word = nearest_bf16(values[c]), left = nearest_bf16(values[c] - from_bf16(word));
      bytes[0][c] = static_cast<uint8_t>(word), bytes[1][c] = static_cast<uint8_t>(word >> 8);
      bytes[2][c] = static_cast<uint8_t>(left), bytes[3][c] = static_cast<uint8_t>(left >> 8);
    }
    for (int b = 0; b < 2; ++b) near[b] = Lookup<kSize>(bytes[b]), rest[b] = Lookup<kSize>(bytes[2 + b]);
  }
  AO_INLINE void look_up(const Lookup<kSize> (&tables)[2], Q codes, P out[2]) {
    const I low = tables[0].look_up(codes), high = tables[1].look_up(codes);
    out[0] = even_words(low, high), out[1] = odd_words(low, high);
  }
  template <int i>
  AO_METHOD void pairs(const uint8_t* tile, P out[2]) const {
    look_up(near, code_quads<kBits, i, true>(tile), out);
  }
  template <int i>
  AO_METHOD void low_pairs(const uint8_t* tile, P out[2]) const {
    look_up(rest, code_quads<kBits, i, true>(tile), out);
  }
};

}  // namespace ao::AO_ISA
