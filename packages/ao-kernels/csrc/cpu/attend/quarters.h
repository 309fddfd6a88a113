// A few rows, which tokens meet as they lie in memory, in quarters of registers.
#pragma once
#include "worker.h"

#if AO_HAS_QUARTERS
namespace ao::AO_ISA::attention {

namespace {

// Rows of queries as products read them in registers.
template <int kLimbs>
void Worker<kLimbs>::turn_queries() {
  by_rows(item.rows, [&]<int kRows>(int64_t r) {
    uint8_t* const out = turned + 8 * r * wide;
    const bool nibbles = a.key.coded.code_bits == 4;
    if (short_keys) return turn_limbs<kRows, 1>(q_bytes + r * wide, wide, nibbles, out);
    if (of_keys == Way::direct) return turn_limbs<kRows, 2>(q_bytes + r * 2 * wide, wide, nibbles, out);
    if (tail_key) return turn_pairs<HalfTokens::kSplit, kRows>(q + r * wide, wide, out);
    turn_pairs<TableTokens::kSplit, kRows>(q + r * wide, wide, out);
  });
}

// q · (what is stored), in rows of kTokenTile.
template <int kLimbs>
void Worker<kLimbs>::meet_keys(int64_t t, int64_t count) {
  const Stored& key = a.key;
  if (!tail_key) begin_pages(key, item.matrix, t + kTokenTile, count);
  // values of the same tokens are next
  const int64_t steps = (count + 7) / 8 * (key.size / 64);
  const Ahead ahead(tail_key ? nullptr : row_of(a.value, item.matrix, t), count * a.value.coded.row_bytes, steps);
  by_rows(item.rows, [&]<int kRows>(int64_t r) {
    const uint8_t* const x = turned + 8 * r * wide;
    float* const to = logits + r * kTokenTile;
    if (tail_key) {
      const auto row = [&](int64_t i) { return tail_row(*tail_key, key.size, t + i); };
      return multiply_keys_pairs<kRows>(HalfTokens{}, row, count, key.size, x, ahead, to);
    }
    const uint8_t* const codes = row_of(key, item.matrix, t);
    if (of_keys == Way::pairs) {
      const auto row = [&](int64_t i) { return codes + i * key.coded.row_bytes; };
      return multiply_keys_pairs<kRows>(TableTokens{SignedTable(key.table)}, row, count, key.size, x, ahead, to);
    }
    const Limbs* const limbs = q_limbs + r;
    if (key.coded.code_bits == 8) return multiply_keys_direct<8, kRows, 2>(key, codes, count, x, limbs, ahead, to);
    if (short_keys) return multiply_keys_direct<4, kRows, 1>(key, codes, count, x, limbs, ahead, to);
    multiply_keys_direct<4, kRows, 2>(key, codes, count, x, limbs, ahead, to);
  });
}

// Keys of the tokens that come next, in so many steps.
template <int kLimbs>
Ahead Worker<kLimbs>::keys_ahead(int64_t t, int64_t count, int64_t steps) const {
  const bool more = !tail_key && t + kTokenTile + count <= a.key.tokens;
  return Ahead(more ? row_of(a.key, item.matrix, t + kTokenTile) : nullptr, count * a.key.coded.row_bytes, steps);
}

// 64 elements from `at` on.
template <int kLimbs>
void Worker<kLimbs>::add_direct(int64_t t, int64_t count, int64_t at) {
  const Stored& value = a.value;
  const int64_t bits = value.coded.code_bits, steps = (short_values ? 1 : 2) * (count / 8);
  const uint8_t* const codes = row_of(value, item.matrix, t) + at * bits / 8;
  if (at == 0) begin_pages(value, item.matrix, t + kTokenTile, count);
  Ahead ahead = keys_ahead(t, count, steps * (a.value_size / 64));
  ahead.skip(at / 64 * steps);
  by_rows(item.rows, [&]<int kRows>(int64_t r) {
    if (short_values) {
      const auto* const bytes = reinterpret_cast<const uint8_t*>(w_bytes) + r * kTokenTile;
      float* const out = part.values + r * a.value_size + at;
      return add_values_bytes<kRows>(value, codes, count, bytes, w_limbs + r, ahead, out, a.value_size);
    }
    const auto both = [&]<int kBits>() {
      const int8_t* const limbs = w_bytes + r * 2 * kTokenTile;
      float* const out = part.values + r * a.value_size + at;
      add_values_half<kBits, kRows, 0>(value, codes, count, limbs, w_limbs + r, ahead, out, a.value_size);
      add_values_half<kBits, kRows, 1>(value, codes, count, limbs, w_limbs + r, ahead, out, a.value_size);
    };
    if (bits == 8) return both.template operator()<8>();
    both.template operator()<4>();
  });
}

template <int kLimbs>
void Worker<kLimbs>::add_pairs(int64_t t, int64_t count) {
  const Stored& value = a.value;
  auto* const words = reinterpret_cast<uint8_t*>(w_bytes);
  if (!tail_value) token_scales(value, item.matrix, t, count, 0, staging, *scales);
  for (int64_t r = 0; r < item.rows; ++r) {
    for (int64_t i = 0; i < kTokenTile; i += 32) {
      F w[2];
      for (int64_t j = 0; j < 2; ++j) {
        const int64_t at = i + 16 * j;
        w[j] = at < count ? load(logits + r * kTokenTile + at) : zero();
        if (!tail_value && at < count) w[j] = mul(w[j], load(scales->scale + at));
      }
      store_vector(words + 2 * (r * kTokenTile + i), join_bf16(w[0], w[1]));
    }
  }
  Ahead ahead = keys_ahead(t, count, (count + 7) / 8 * (a.value_size / 64));
  by_rows(item.rows, [&]<int kRows>(int64_t r) {
    for (int64_t at = 0; at < a.value_size; at += 64) {
      const uint8_t* const w = words + 2 * r * kTokenTile;
      float* const out = part.values + r * a.value_size + at;
      if (tail_value) {
        const auto row = [&](int64_t i) { return tail_row(*tail_value, value.size, t + i); };
        add_values_pairs<kRows>(HalfTokens{}, row, count, at, w, ahead, out, a.value_size);
      } else {
        const uint8_t* const codes = row_of(value, item.matrix, t);
        const auto row = [&](int64_t i) { return codes + i * value.coded.row_bytes; };
        add_values_pairs<kRows>(TableTokens{SignedTable(value.table)}, row, count, at, w, ahead, out, a.value_size);
      }
    }
  });
}

}  // namespace

}  // namespace ao::AO_ISA::attention
#endif  // AO_HAS_QUARTERS
