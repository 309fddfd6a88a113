// What a thread does with a part of the tokens of an item.
#pragma once
#include "direct.h"
#include "item.h"

namespace ao::AO_ISA::attention {

namespace {  // members of templates are exported otherwise

// How keys or values meet rows: both as floats; as bytes and limbs, from panels or directly; as pairs of bfloat16.
enum class Way { floats, panels, direct, pairs };

// A part of an item, tile by tile. kLimbs: of queries and weights, where codes are multiplied as bytes.
template <int kLimbs>
struct Worker {
  // with more limbs results are wanted that bfloat16 is too coarse for
  static constexpr bool kDirect = (AO_HAS_QUARTERS || AO_HAS_CODE_WORDS) && kLimbs == 2;
  const Attend& a;
  const Item item;
  const Tail* tail_key;  // null: tokens of blocks
  const Tail* tail_value;
  const Part part;
  Way of_keys, of_values;
  bool short_keys, short_values;  // one limb meets them
  float scale;  // of logits, where queries have not taken it
  int64_t wide;
  float *q, *scaled, *logits, *weights, *centers, *staging;
  float *kept, *shifts;
  uint8_t *keys, *values, *turned;
  int8_t *q_bytes, *w_bytes;
  Limbs *q_limbs, *w_limbs;
  TokenScales* scales;

  Worker(const Attend& call, int64_t index, bool is_tail, float* partial, uint8_t* memory)
      : a(call), item(item_at(call, index)), tail_key(is_tail ? &call.tail_key : nullptr),
        tail_value(is_tail ? &call.tail_value : nullptr), part(part_at(call, partial)) {
    wide = (a.key.size + 63) / 64 * 64;
    Scratch from{memory};
    keys = from.take<uint8_t>(kTokenTile * wide * 4), values = from.take<uint8_t>(kTokenTile * a.value_size * 4);
    q = from.take<float>(a.rows * wide), scaled = from.take<float>(wide);
    logits = from.take<float>(a.rows * kTokenTile), weights = from.take<float>(kTokenTile);
    centers = from.take<float>(a.rows), kept = from.take<float>(a.rows);
    shifts = from.take<float>(a.rows);
    q_bytes = from.take<int8_t>(a.rows * wide * kLimbs), w_bytes = from.take<int8_t>(a.rows * kTokenTile * kLimbs);
    q_limbs = from.take<Limbs>(a.rows), w_limbs = from.take<Limbs>(a.rows);
    scales = from.take<TokenScales>(1), staging = from.take<float>(a.staging);
    turned = from.take<uint8_t>(a.rows <= kFewRows ? 8 * a.rows * wide : 0);
    of_keys = way_of(a.key, tail_key), of_values = way_of(a.value, tail_value);
    short_keys = is_short(a.key, of_keys) && a.key.grid == Grid::channel, short_values = is_short(a.value, of_values);
    scale = of_keys == Way::pairs ? a.scale : 1.0f;
  }

  Way way_of(const Stored& s, const Tail* tail) const {
    // sums of 256 products with two limbs fit 32 bits
    const bool direct = kDirect && item.rows <= kFewRows && s.size % 64 == 0 && s.size <= 256;
    if (tail || s.grid == Grid::floats) return AO_HAS_QUARTERS && direct && (tail || s.words) ? Way::pairs : Way::floats;
    return direct ? Way::direct : Way::panels;
  }

  // Codes of 4 bits with zero points, whose scales are not negative.
  bool is_short(const Stored& s, Way way) const {
    return AO_HAS_QUARTERS && way == Way::direct && s.coded.code_bits == 4 && s.coded.zero_type != Zero::none;
  }

  void run(Span tokens) {
    for (int64_t r = 0; r < item.rows; ++r) part.greatest[r] = -__builtin_inff(), part.total[r] = 0;
    __builtin_memset(part.values, 0, static_cast<size_t>(item.rows * a.value_size) * sizeof(float));
    Span seen{a.tokens, 0};  // by any row
    for (int64_t t = 0; t < item.queries; ++t) {
      const Span one = seen_by(a, item, item.first + t);
      if (one.begin >= one.end) continue;
      seen.begin = one.begin < seen.begin ? one.begin : seen.begin, seen.end = one.end > seen.end ? one.end : seen.end;
    }
    tokens.end = seen.end < tokens.end ? seen.end : tokens.end;
    if (seen.begin > tokens.begin) tokens.begin += (seen.begin - tokens.begin) / kTokenTile * kTokenTile;
    if (tokens.begin >= tokens.end) return;
    read_queries(a, item, of_keys == Way::pairs ? 1.0f : a.scale, wide, q);
    if (!tail_key) {
      center_logits(a, item, q, scale, wide, centers);
      rotate(a.key.rotation, q, item.rows, wide, staging);
      if (a.key.grid == Grid::token) {
        for (int64_t r = 0; r < item.rows; ++r) {
          q_limbs[r] = to_limbs<kLimbs>(q + r * wide, wide, q_bytes + r * kLimbs * wide, wide);
        }
      }
    }
    if constexpr (kDirect) {
      if (of_keys == Way::pairs || (of_keys == Way::direct && a.key.grid == Grid::token)) this->turn_queries();
    }
    for (int64_t t = tokens.begin; t < tokens.end; t += kTokenTile) {
      const int64_t count = tokens.end - t < kTokenTile ? tokens.end - t : kTokenTile;
      find_logits(t, count);
      for (int64_t r = 0; r < item.rows; ++r) {
        const Span one = seen_by(a, item, item.first + r / a.group);
        const Span here{one.begin > t ? one.begin - t : 0, one.end - t < count ? one.end - t : count};
        kept[r] = soften(logits + r * kTokenTile, here, a.softcap, part.greatest[r], part.total[r]);
        if (kept[r] != 1.0f) {
          float* const to = part.values + r * a.value_size;
          for (int64_t i = 0; i < a.value_size; i += 16) store(to + i, mul(load(to + i), splat(kept[r])));
        }
      }
      add_values(t, count);
    }
    if (!tail_value && of_values != Way::floats && !(AO_HAS_CODE_WORDS && of_values == Way::direct)) in_order();
    if (!tail_value) rotate(a.value.rotation, part.values, item.rows, a.value_size, staging);
  }

  // q · (what is stored), in rows of kTokenTile.
  void multiply_keys_of(int64_t t, int64_t count) {
    const Stored& key = a.key;
    if (of_keys == Way::floats) {
      auto* const panel = reinterpret_cast<float*>(keys);
      key_floats(key, tail_key, a.type, item.matrix, t, count, wide, panel, staging);
      return by_rows(item.rows, [&]<int kRows>(int64_t r) {
        multiply_keys<kRows>(panel, q, r, (count + 15) / 16 * 16, key.size, wide, logits);
      });
    }
    if (of_keys == Way::panels) {
      key_bytes(key, a.value, item.matrix, t, count, wide, keys);
      const LimbRows rows{q_bytes, q_limbs, wide};
      const auto least = least_of(key);
      return by_rows(item.rows, [&]<int kRows>(int64_t r) {
        if (key.coded.code_bits < 8 && !kWideBytes) {
          multiply_keys<kRows, kLimbs, true>(keys, rows, r, count, least, logits);
        } else {
          multiply_keys<kRows, kLimbs, false>(keys, rows, r, count, least, logits);
        }
      });
    }
    if constexpr (kDirect) this->meet_keys(t, count);
  }

  // Where a token of a tail begins.
  const uint8_t* tail_row(const Tail& tail, int64_t size, int64_t token) const {
    const int64_t place = (item.matrix * tail.slots + token % tail.slots) * size;
    return static_cast<const uint8_t*>(tail.data) + place * bytes_of(a.type);
  }

  void find_logits(int64_t t, int64_t count) {
    const Stored& key = a.key;
    if (!tail_key && key.grid == Grid::channel) scale_queries(t);
    multiply_keys_of(t, count);
    if (tail_key) return scale_logits(count, scale, [](int64_t) { return 0.0f; });
    if (key.grid == Grid::channel) {
      return scale_logits(count, 1, [&](int64_t r) { return centers[r] + shifts[r]; });
    }
    if (of_keys == Way::floats) return scale_logits(count, 1, [&](int64_t r) { return centers[r]; });
    token_scales(key, item.matrix, t, count, 0, staging, *scales);
    for (int64_t i = 0; scale != 1 && i < count; i += 16) store(scales->scale + i, mul(load(scales->scale + i), splat(scale)));
    for (int64_t r = 0; r < item.rows; ++r) {
      const Limbs& of_row = q_limbs[r];
      float total = 0;  // of the queries, where there are zero points
      for (int l = kLimbs - 1; scales->shifted && l >= 0; --l) total = total * 256 + static_cast<float>(of_row.sum[l]);
      const F sums = splat(total * of_row.unit), center = splat(centers[r]);
      for (int64_t i = 0; i < count; i += 16) {
        float* const to = logits + r * kTokenTile + i;
        F x = fma(load(to), load(scales->scale + i), center);
        if (scales->shifted) x = fma(sums, load(scales->shift + i), x);
        store(to, x);
      }
    }
  }

  template <class Shift>
  void scale_logits(int64_t count, float by, const Shift& shift) {
    for (int64_t r = 0; r < item.rows; ++r) {
      const F factor = splat(by), more = splat(shift(r));
      float* const to = logits + r * kTokenTile;
      for (int64_t i = 0; i < count; i += 16) store(to + i, fma(load(to + i), factor, more));
    }
  }

  float key_middle() const { return a.key.least + static_cast<float>(kMiddle); }

  // Scales of channels are the queries' to take, and q · (-zero * scale) is the same for all tokens of the tile.
  void scale_queries(int64_t token) {
    const Dequantize& d = a.key.coded;
    const Blocks& b = d.blocks;
    const int64_t place = (item.matrix * b.bands + token / b.block_n) * b.groups;
    float *const by = staging, *const zeros = staging + wide;
    __builtin_memset(staging, 0, static_cast<size_t>(2 * wide) * sizeof(float));
    read_scales(d.scale, element_of(d.scale_type), place, a.key.size, by);
    if (d.zero_type != Zero::none) read_scales(d.zero, element_of(d.zero_type), place, a.key.size, zeros);
    for (int64_t r = 0; r < item.rows; ++r) {
      F shift = zero();
      I top = splat_int(0);
      const F middle = splat(short_keys ? key_middle() : 0.0f);
      for (int64_t i = 0; i < wide; i += 16) {
        const F x = mul(load(q + r * wide + i), load(by + i));
        store(scaled + i, x), top = greatest_bits(top, x);
        shift = fma(x, sub(middle, load(zeros + i)), shift);
      }
      shifts[r] = sum(shift);
      if (short_keys) {
        q_limbs[r] = to_limbs<1>(scaled, wide, top, q_bytes + r * wide, wide);
      } else {
        q_limbs[r] = to_limbs<kLimbs>(scaled, wide, top, q_bytes + r * kLimbs * wide, wide);
      }
    }
    if constexpr (kDirect) {
      if (of_keys == Way::direct) this->turn_queries();
    }
  }

  void add_values(int64_t t, int64_t count) {
    const Stored& value = a.value;
    if constexpr (AO_HAS_QUARTERS && kDirect) {
      if (of_values == Way::pairs) return this->add_pairs(t, count);
    }
    if (of_values == Way::floats) {
      auto* const panel = reinterpret_cast<float*>(values);
      value_floats(value, tail_value, a.type, item.matrix, t, count, a.value_size, panel);
      return by_rows(item.rows, [&]<int kRows>(int64_t r) {
        multiply_values<kRows>(panel, logits, r, count, a.value_size, part.values);
      });
    }
    if (of_values == Way::panels) value_bytes(value, a.key, item.matrix, t, count, a.value_size, values);
    const auto least = least_of(value);
    const LimbRows rows{w_bytes, w_limbs, kTokenTile};
    for (int64_t at = 0; at < a.value_size; at += 64) {
      if (at % value.group == 0) scale_weights(t, count, at / value.group);
      if constexpr (kDirect) {
        if (of_values == Way::direct) this->add_direct(t, count, at);
      }
      if (of_values == Way::panels) by_rows(item.rows, [&]<int kRows>(int64_t r) {
        const uint8_t* const panel = values + at * kTokenTile;
        if (value.coded.code_bits < 8 && !kWideBytes) {
          multiply_values<kRows, kLimbs, true>(panel, rows, r, count, least, part.values + at, a.value_size);
        } else {
          multiply_values<kRows, kLimbs, false>(panel, rows, r, count, least, part.values + at, a.value_size);
        }
      });
      if (!scales->shifted) continue;
      for (int64_t r = 0; r < item.rows; ++r) {
        float* const to = part.values + r * a.value_size + at;
        const F by = splat(shifts[r]);
        for (int64_t i = 0; i < 64; i += 16) store(to + i, add(load(to + i), by));
      }
    }
  }

  // Weights take the scales of tokens, those of one group of elements.
  void scale_weights(int64_t token, int64_t count, int64_t group) {
    token_scales(a.value, item.matrix, token, count, group, staging, *scales);
    const F middle = splat(short_values ? a.value.least + static_cast<float>(kMiddle) : 0.0f);
    for (int64_t i = 0; short_values && i < count; i += 16) {
      store(scales->shift + i, fma(middle, load(scales->scale + i), load(scales->shift + i)));
    }
    for (int64_t r = 0; r < item.rows; ++r) {
      const float* const p = logits + r * kTokenTile;
      F shift = zero();
      I top = splat_int(0);
      for (int64_t i = 0; i < kTokenTile; i += 16) {
        const F weight = i < count ? load(p + i) : zero();
        F x = zero();
        if (i < count) {
          x = mul(weight, load(scales->scale + i));
          if (scales->shifted) shift = fma(weight, load(scales->shift + i), shift);
        }
        store(weights + i, x), top = greatest_bits(top, x);
      }
      shifts[r] = sum(shift);
      if (short_values) {
        w_limbs[r] = to_bytes(weights, kTokenTile, top, reinterpret_cast<uint8_t*>(w_bytes) + r * kTokenTile);
      } else {
        w_limbs[r] = to_limbs<kLimbs>(weights, kTokenTile, top, w_bytes + r * kLimbs * kTokenTile, kTokenTile);
      }
    }
  }

  // Values as `interleave` or `interleave_nibbles` leaves them are put into their order.
  void in_order() {
    const bool nibbles = of_values == Way::direct && a.value.coded.code_bits == 4;
    for (int64_t r = 0; r < item.rows * a.value_size; r += 64) {
      float* const to = part.values + r;
      float from[64];
      __builtin_memcpy(from, to, sizeof from);
      if (nibbles) {
        for (int i = 0; i < 64; ++i) {
          const int byte = i / 2, vector = byte / 8 % 2 * 2 + i % 2, quarter = byte / 16 + byte / 4 % 2 * 2;
          to[i] = from[vector * 16 + quarter * 4 + byte % 4];
        }
      } else {
        for (int i = 0; i < 64; ++i) to[i] = from[i / 4 % 4 * 16 + i / 16 * 4 + i % 4];
      }
    }
  }

  // -- a few rows, which tokens meet as they lie in memory: quarters.h, words.h
  void turn_queries();                                      // rows of queries as products read them
  void meet_keys(int64_t t, int64_t count);                 // q · (what is stored), in rows of kTokenTile
  void add_direct(int64_t t, int64_t count, int64_t at);    // 64 elements from `at` on
  void add_pairs(int64_t t, int64_t count);
#if AO_HAS_QUARTERS
  Ahead keys_ahead(int64_t t, int64_t count, int64_t steps) const;  // of the tokens that come next
#endif
};

}  // namespace

}  // namespace ao::AO_ISA::attention
