// M = 1: one row of activations times weights, by int8 dot products, which need little decoding. Activations are
// block floating point: fixed-point numbers of two or three signed bytes, the limbs, with one exponent per block.
// LUTs whose values are not integers are taken apart in the same way.
//
// Every 128 columns, or those of a group, share an exponent. Three limbs carry 23 bits below the largest of
// them, as much as sums in float32; two carry 15, for activations in bfloat16, which has 8: elements within
// 1/128 of the largest are exact, and the rest is below what the output is rounded to. Where numbers differ
// more, as between the layers of a gated feed-forward network, one more limb follows; where that does not
// suffice either, the row is refused.
#pragma once
#include "scales.h"

namespace ao::AO_ISA {

// Blocks of N that share a read of the activations, where there are registers for that. Their sums do not
// wait for each other, either.
constexpr int kLimbBlocks = kRegisters == 1 ? 4 : 1;

// By how many powers of two the largest number of a step may exceed the others on average (over their
// exponents): beyond that, outliers would cost the others more than the dtype's own rounding does.
// Normally distributed numbers have 2 to 3.
AO_INLINE int32_t greatest_spread(Element type) {
  return type == Element::f32 ? 4 : type == Element::bf16 ? 5 : 10;
}

// The exponent of the largest number of a step, at least: units of smaller ones would be subnormal.
constexpr int kLeastExponent = -80;

// Activations of a step in limbs, which are written from `out` on.
template <int kLimbs>
AO_INLINE LimbStep limbs_of(const Linear& t, const F* x, int tiles, float largest_value, int exponent,
                              uint8_t* out) {
  constexpr int kTop = 8 * kLimbs - 2;  // the exponent of the largest number
  constexpr float kLimit = kLimbs == 4 ? 2139062016.0f : kLimbs == 3 ? 8355711.0f : 32639.0f;  // 127 in each limb
  int unit = exponent - kTop < -122 ? -122 : exponent - kTop;
  if (largest_value * power_of_two(-unit) > kLimit) ++unit;
  const F to_units = splat(power_of_two(-unit));
  I sums[kLimbs];
  for (I& sum : sums) sum = splat_int(0);
  for (int i = 0; i < tiles; ++i, out += kLimbs * 16) {
    I rest = round_to_int(mul(x[i], to_units));
    for (int d = 0; d < kLimbs; ++d) {
      const I limb = sign_extend_byte(rest);
      store_bytes(out + d * 16, limb);
      sums[d] = add(sums[d], limb);
      rest = shift_right<8>(subtract(rest, limb));
    }
  }
  LimbStep step{};
  int64_t total = 0;
  const int signed_bytes = base_of(t) == t.least ? 0 : t.table_parts;
  int32_t of_limb[kLimbs];
  for (int d = kLimbs - 1; d >= 0; --d) {
    of_limb[d] = sum_of(sums[d]);
    total = total * 256 + of_limb[d];
    step.acc_init[d] = of_limb[d] * static_cast<int32_t>(t.least);
    // products of signed bytes and limb e lack so much, and those of a value's bytes go to as many sums, down from e
    for (int e = d; e < kLimbs && e < d + signed_bytes; ++e) step.acc_init[d] += of_limb[e] * kByteBase;
  }
  step.sum = static_cast<float>(total) * power_of_two(unit) * t.table_unit;
  step.unit = power_of_two(unit + 8 * (t.table_parts - 1)) * t.table_unit;
  return step;
}

// Meanwhile the first weights arrive that will be multiplied by them.
template <int kLimbs>
static bool pack_limbs(const Linear& t, int64_t block) {
  const int64_t tile_bytes = 32 * t.bits, stride = t.tiles * tile_bytes;
  const uint8_t* codes = t.qdata + block * stride;
  const uint8_t* const near = codes + kPrefetchL2 / kLimbBlocks;
  const auto* row = static_cast<const uint8_t*>(t.x);
  uint8_t* out = t.x_packed;
  auto* steps = static_cast<LimbStep*>(t.x_sums);
  const int size = bytes_of(t.type);
  t.x_scale[0] = 1.0f;
  // where values are limbs, too, products of the last ones are left out
  const int32_t allowed = greatest_spread(t.type), more_allowed = t.table_parts == 1 ? 8 : 4;
  KRange at = k_range_of(t, 0);
  for (int64_t s = 0; s < t.step_count; ++s) {
    if (t.steps[s].group != at.group) at = k_range_of(t, t.steps[s].group);
    const int tiles = t.steps[s].tiles;
    for (const uint8_t* const end = codes + tiles * tile_bytes; codes < end; codes += 64) {
      for (int b = 0; b < kLimbBlocks && codes < near; ++b) __builtin_prefetch(codes + b * stride, 0, 2);
    }
    F x[kLimbTiles];
    I top = splat_int(0), exponents = top, zeros_or_minus_one = top;
    for (int i = 0; i < tiles; ++i, at.k += 16) {
      x[i] = load_as(t.type, row + at.k * size, at.count());
      const I magnitude = bits_of(abs(x[i]));
      top = max_int(top, magnitude);
      exponents = add(exponents, shift_right<23>(magnitude));
      zeros_or_minus_one = add(zeros_or_minus_one, shift_right<31>(subtract(splat_int(0), magnitude)));
    }
    const int32_t bits = largest(top);
    if (bits >= (kHugeExponent + 127) << 23) return false;  // infinities and NaN have no limbs
    const int32_t count = -sum_of(zeros_or_minus_one);
    const int32_t spread = count * (bits >> 23) - sum_of(exponents);
    if (spread > count * (allowed + more_allowed)) return false;
    const bool more = spread > count * allowed;
    const int exponent = (bits >> 23) - 127;
    if (bits != 0 && exponent < kLeastExponent) return false;
    float largest_value;
    __builtin_memcpy(&largest_value, &bits, 4);
    steps[s] = more ? limbs_of<kLimbs + 1>(t, x, tiles, largest_value, exponent, out)
                    : limbs_of<kLimbs>(t, x, tiles, largest_value, exponent, out);
    steps[s].more = more;
    out += (kLimbs + more) * tiles * 16;
  }
  return true;
}

// Activations in 8-bit integers are one limb already.
static void pack_byte(const Linear& t) {
  auto* steps = static_cast<LimbStep*>(t.x_sums);
  pack_row<Mode::int8>(t, 0, t.x_packed, 1, steps);  // leaves 4 bytes for each step
  for (int64_t s = t.step_count - 1; s >= 0; --s) {
    const uint8_t* sum = static_cast<const uint8_t*>(t.x_sums) + s * 4;
    LimbStep step{};
    step.unit = 1;
    if (t.zero_type == Zero::none) {
      __builtin_memcpy(&step.acc_init[0], sum, 4);
    } else {
      __builtin_memcpy(&step.sum, sum, 4);
      step.acc_init[0] = static_cast<int32_t>(step.sum * base_of(t));
    }
    steps[s] = step;
  }
}

// Weights as one byte each.
template <int kBits, Kind kKind>
struct WholeTable : ByteDecoder<kBits, kKind> {
  static constexpr int kParts = 1;
  inline __attribute__((always_inline)) explicit WholeTable(const Linear& t)
      : ByteDecoder<kBits, kKind>(t.table, t.least, t.table_unit) {}
  template <int i>
  inline __attribute__((always_inline)) void get(const uint8_t* tile, Q out[1]) const {
    out[0] = this->template quads<i>(tile);
  }
};

#if AO_HAS_BYTE_TABLES
// Values less the least one as numbers of several bytes, the last one first. The least one is a whole number of
// first bytes: value 0 has zeros in all others, and products with it, which the initial sums take off as whole
// numbers, make exactly 0 though the least products of limbs are left out.
template <int kBits, int kBytes>
struct SplitTable {
  static constexpr int kParts = kBytes;
  ByteTable<kBits> parts[kBytes];
  inline __attribute__((always_inline)) explicit SplitTable(const Linear& t) {
    uint8_t bytes[kBytes][1 << kBits];
    constexpr double kFirst = 1 << 8 * (kBytes - 1), kGreatest = 256 * kFirst - 1;  // rounding may lead beyond it
    for (int c = 0; c < 1 << kBits; ++c) {
      const double number = static_cast<double>(t.table[c]) / t.table_unit - t.least * kFirst;
      auto whole = static_cast<uint32_t>(__builtin_rint(number < kGreatest ? number : kGreatest));
      for (int p = 0; p < kBytes; ++p, whole >>= 8) bytes[p][c] = static_cast<uint8_t>(whole ^ kByteBase);
    }
    for (int p = 0; p < kBytes; ++p) parts[p] = ByteTable<kBits>(bytes[p]);
  }
  template <int i>
  inline __attribute__((always_inline)) void get(const uint8_t* tile, Q out[kBytes]) const {
    const Q found = indices<kBits, i>(tile);
#pragma GCC unroll 3
    for (int p = 0; p < kBytes; ++p) out[p] = parts[p].template look_up<i>(found);
  }
};
#endif

// The sums of products of part p and limb d belong together where p + d is the same; those below the last
// limb of the result are left out. The tiles of several blocks share the activations.
template <class Table, int kLimbs, bool kSmall, int i, int kBlocks>
AO_INLINE void add_quad(const Table& table, const uint8_t* tile, int64_t stride, const uint8_t* x,
                        I (&sums)[kBlocks][kLimbs]) {
  Q w[kBlocks][Table::kParts];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) table.template get<i>(tile + b * stride, w[b]);
#pragma GCC unroll 4
  for (int d = 0; d < kLimbs; ++d) {
    const auto limb = quad_of<i>(x + d * 16);
#pragma GCC unroll 3
    for (int p = 0; p < Table::kParts; ++p) {
      const int level = p + d - (Table::kParts - 1);
      if (level < 0) continue;
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sums[b][level] = dot_quads<kSmall>(sums[b][level], w[b][p], limb);
    }
  }
}

// What the sums of all limbs stand for, in units of the last one.
template <int kLimbs>
AO_INLINE F number_of(const I (&sums)[kLimbs]) {
  if constexpr (kLimbs == 1) return to_float(sums[0]);
  if constexpr (kLimbs == 4) {
    const I lower[3] = {sums[1], sums[2], sums[3]};
    return fma(number_of<3>(lower), splat(256.0f), to_float(sums[0]));
  }
  // a step has too few columns for an overflow
  const F upper = to_float(add(shift_left<8>(sums[kLimbs - 1]), sums[kLimbs - 2]));
  return kLimbs == 2 ? upper : fma(upper, splat(256.0f), to_float(sums[0]));
}

// Where a thread reads the codes of kBlocks blocks that are computed together.
template <int kBits, int kBlocks>
struct Stream {
  static constexpr int64_t kNear = kPrefetchL2 / kBlocks;
  const uint8_t* tile;
  int64_t stride;      // bytes of a block
  const uint8_t* near;  // from here on, what is asked for lies behind the end of the block ...
  int64_t further;     // ... so much further, behind the blocks that are read with it; or nothing is left

  AO_METHOD void ask() const {
    const uint8_t* const prefetch = tile + (tile < near ? kNear : further);
#pragma GCC unroll 8
    for (int line = 0; line < 32 * kBits; line += 64) {
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        __builtin_prefetch(prefetch + b * stride + line, 0, 2);
        // whole bytes take little time to multiply, and as many lines of L2 more to ask for
        if constexpr (kBits < 8) __builtin_prefetch(tile + kPrefetchL1 + b * stride + line);
      }
    }
  }
};

// The products of one step of activations; stream and x move on behind it.
template <int kBits, class Table, int kLimbs, int kBlocks>
AO_INLINE void limb_sums(const LimbStep& step, int tiles, const Table& table, Stream<kBits, kBlocks>& codes,
                          const uint8_t*& x, F (&out)[kBlocks]) {
  constexpr bool kSmall = kBits < 8 && Table::kParts == 1;  // bytes are below 128
  // sums that do not wait for each other
  constexpr int kChains = kBlocks == 1 && kRegisters == 1 ? 2 : 1;
  I sums[kChains][kBlocks][kLimbs];
#pragma GCC unroll 4
  for (int d = 0; d < kLimbs; ++d) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      sums[0][b][d] = splat_int(step.acc_init[d]);
      if constexpr (kChains == 2) sums[1][b][d] = splat_int(0);
    }
  }
  for (; tiles > 0; --tiles, codes.tile += 32 * kBits, x += kLimbs * 16) {
    codes.ask();
    add_quad<Table, kLimbs, kSmall, 0>(table, codes.tile, codes.stride, x, sums[0]);
    add_quad<Table, kLimbs, kSmall, 1>(table, codes.tile, codes.stride, x, sums[kChains - 1]);
    add_quad<Table, kLimbs, kSmall, 2>(table, codes.tile, codes.stride, x, sums[0]);
    add_quad<Table, kLimbs, kSmall, 3>(table, codes.tile, codes.stride, x, sums[kChains - 1]);
  }
  const F unit = splat(step.unit);
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    I(&own)[kLimbs] = sums[0][b];
#pragma GCC unroll 4
    for (int d = 0; kChains == 2 && d < kLimbs; ++d) own[d] = add(own[d], sums[kChains - 1][b][d]);
    out[b] = mul(number_of(own), unit);
  }
}

// Asks for what the next blocks have at `next`: numbers of `size` bytes, once for each line.
template <int kBlocks>
AO_INLINE void ask_for(const void* values, int size, int64_t next, int64_t stride) {
  if ((next * size & 63) >= 16 * size) return;
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    __builtin_prefetch(static_cast<const uint8_t*>(values) + (next + b * stride) * size);
  }
}

// kBlocks blocks of N; the thread goes on with block `then`, if there is one.
template <int kBits, class Table, int kLimbs, int kBlocks>
static void limb_blocks(const Linear& t, const Table& table, int64_t block, int64_t then,
                         void (*write)(const Linear&, Rows, int64_t, int64_t, const float*)) {
  const bool more = then * 16 < t.n;
  const int64_t stride = t.tiles * 32 * kBits, groups = t.groups * 16;
  const uint8_t* const first = t.qdata + block * stride;
  constexpr int64_t kNear = Stream<kBits, kBlocks>::kNear;
  const int64_t further = more ? kNear + (then - block - 1) * stride : 0;
  Stream<kBits, kBlocks> codes{first, stride, first + stride - kNear, further};
  const ScaleView scales = t.scale;
  const Zero zero_type = t.zero_type;
  const uint8_t* x = t.x_packed;
  const auto* limbs = static_cast<const LimbStep*>(t.x_sums);
  F totals[kBlocks];
  for (F& total : totals) total = zero();
  for (const Step *s = t.steps, *const end = s + t.step_count; s != end;) {
    // outer scales multiply the sums of their span
    const int64_t span = s->span;
    F scaled[kBlocks], offsets[kBlocks];
    for (int b = 0; b < kBlocks; ++b) scaled[b] = offsets[b] = zero();
    for (; s != end && s->span == span; ++s, ++limbs) {
      F products[kBlocks];
      // activations in 8-bit integers are one limb, and no more
      if (kLimbs > 1 && limbs->more) {
        limb_sums<kBits, Table, kLimbs == 1 ? 1 : kLimbs + 1>(*limbs, s->tiles, table, codes, x, products);
      } else {
        limb_sums<kBits, Table, kLimbs>(*limbs, s->tiles, table, codes, x, products);
      }
      const F of_zero = splat(-limbs->sum);
      const int64_t i = block * groups + s->group * 16, next = i + (then - block) * groups;
      F scale[kBlocks], zero_term[kBlocks];
      ask_for<kBlocks>(scales.values, bytes_of(scales.type), next, groups);
      if (zero_type == Zero::scaled) {
        ask_for<kBlocks>(t.offset.values, bytes_of(t.offset.type), next, groups);
        scales_at(t.offset.values, t.offset.type, i, groups, zero_term);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) offsets[b] = fma(zero_term[b], of_zero, offsets[b]);
      } else if (zero_type != Zero::none) {
        ask_for<kBlocks>(t.zero, bytes_of(zero_type), next, groups);
        zeros_at(t, i, groups, zero_term);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) products[b] = fma(zero_term[b], of_zero, products[b]);
      }
      scales_at(scales.values, scales.type, i, groups, scale);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) scaled[b] = fma(scale[b], products[b], scaled[b]);
    }
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t i = ((block + b) * t.spans + span) * 16;
      totals[b] = fma(outer_at(t.scale, i), scaled[b], totals[b]);
      if (zero_type == Zero::scaled) totals[b] = fma(outer_at(t.offset, i), offsets[b], totals[b]);
    }
  }
  float out[kBlocks * 16];
  for (int b = 0; b < kBlocks; ++b) store(out + b * 16, totals[b]);
  write(t, {0, 1}, block, kBlocks, out);
}

template <int kBits, class Table, int kLimbs>
static void run_limb_blocks(const Linear& t, int64_t begin, int64_t end, int64_t then,
                          void (*write)(const Linear&, Rows, int64_t, int64_t, const float*)) {
  const Table table(t);
  int64_t block = begin;
  if constexpr (kLimbBlocks > 1) {
    for (; block + kLimbBlocks <= end; block += kLimbBlocks) {
      const int64_t next = block + kLimbBlocks < end ? block + kLimbBlocks : then;
      limb_blocks<kBits, Table, kLimbs, kLimbBlocks>(t, table, block, next, write);
    }
  }
  for (; block < end; ++block) {
    limb_blocks<kBits, Table, kLimbs, 1>(t, table, block, block + 1 < end ? block + 1 : then, write);
  }
}

}  // namespace ao::AO_ISA
