// Norms, gates and rotary embeddings; included by the unit of an instruction set.
//
// Results of every operation that a model writes down are rounded to its dtype, as torch rounds them; sums and
// exponential functions are in float32.
#pragma once
#include "kernels.h"

namespace ao::AO_ISA::block {

AO_INLINE int count_at(int64_t i, int64_t n) { return n - i < 16 ? static_cast<int>(n - i) : 16; }

// The values that are left when v is stored.
AO_INLINE F rounded(Element type, F v) {
  if (type == Element::f32) return v;
  alignas(64) uint8_t stored[32];
  store_as(type, stored, v, 16);
  return load_as(type, stored, 16);
}

AO_INLINE const uint8_t* at(const void* p, int64_t element, int size) {
  return static_cast<const uint8_t*>(p) + element * size;
}
AO_INLINE uint8_t* at(void* p, int64_t element, int size) { return static_cast<uint8_t*>(p) + element * size; }

static inline void norm(const Norm& t, int64_t begin, int64_t end) {
  const int size = bytes_of(t.type);
  for (int64_t row = begin; row < end; ++row) {
    const void* h = at(t.x, row * t.n, size);
    F squares[2] = {zero(), zero()};
    for (int64_t i = 0; i < t.n; i += 16) {
      const int count = count_at(i, t.n);
      F v = load_as(t.type, at(h, i, size), count);
      if (t.residual) {
        v = rounded(t.type, add(v, load_as(t.type, at(t.residual, row * t.n + i, size), count)));
        store_as(t.type, at(t.h, row * t.n + i, size), v, count);
      }
      squares[i / 16 & 1] = fma(v, v, squares[i / 16 & 1]);
    }
    if (!t.y) continue;
    if (t.residual) h = at(t.h, row * t.n, size);
    const float mean = sum(add(squares[0], squares[1])) / static_cast<float>(t.n);
    const F r = splat(1.0f / __builtin_sqrtf(mean + t.eps));
    for (int64_t i = 0; i < t.n; i += 16) {
      const int count = count_at(i, t.n);
      F v = mul(load_as(t.type, at(h, i, size), count), r), w = load_as(t.type, at(t.weight, i, size), count);
      if (t.gain == Gain::rounded) v = rounded(t.type, v);
      if (t.gain == Gain::plus_one) w = add(w, splat(1.0f));
      store_as(t.type, at(t.y, row * t.n + i, size), mul(v, w), count);
    }
  }
}

// exp(x) within 2 units in the last place, for x from -87 to 88: 2^k * p(x - k log 2), p of degree 6.
AO_INLINE F exp_of(F x) {
  const F k = to_float(round_to_int(mul(x, splat(1.44269504f))));
  const F f = fma(k, splat(2.12194440e-4f), fma(k, splat(-0.693359375f), x));
  F p = splat(1.9875691500e-4f);
  p = fma(p, f, splat(1.3981999507e-3f));
  p = fma(p, f, splat(8.3334519073e-3f));
  p = fma(p, f, splat(4.1665795894e-2f));
  p = fma(p, f, splat(1.6666665459e-1f));
  p = fma(p, f, splat(0.5f));
  p = add(fma(mul(f, f), p, f), splat(1.0f));
  return mul(p, as_float(shift_left<23>(add(round_to_int(k), splat_int(127)))));
}

// x * sigmoid(v). NaN and infinities of x stay; beyond ±87 the sigmoid is 1, or 0 with any x that is finite.
AO_INLINE F times_sigmoid(F x, F v) {
  const F low = max(splat(-87.0f), min(splat(87.0f), sub(zero(), v)));
  return div(x, add(splat(1.0f), exp_of(low)));
}

AO_INLINE F gate_of(Gate gate, F x) {
  if (gate == Gate::silu) return times_sigmoid(x, x);
  const F cubic = mul(mul(x, x), x);
  return times_sigmoid(x, mul(splat(1.5957691216f), fma(splat(0.044715f), cubic, x)));  // sqrt(8 / pi)
}

static inline void gated(const Gated& t, int64_t begin, int64_t end) {
  const int size = bytes_of(t.type);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = 0; i < t.n; i += 16) {
      const int count = count_at(i, t.n);
      const F gate = load_as(t.type, at(t.x, row * 2 * t.n + i, size), count);
      const F up = load_as(t.type, at(t.x, (row * 2 + 1) * t.n + i, size), count);
      store_as(t.type, at(t.y, row * t.n + i, size), mul(rounded(t.type, gate_of(t.gate, gate)), up), count);
    }
  }
}

// x * cosine + (the other half of x, of the other sign in the first half) * sine.
AO_INLINE void rotate(const Heads& t, const void* x, void* y, const void* cosine, const void* sine) {
  const int size = bytes_of(t.type);
  const int64_t half = t.rotary / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int count = count_at(i, half);
    const F a = load_as(t.type, at(x, i, size), count), b = load_as(t.type, at(x, half + i, size), count);
    const auto turned = [&](F own, F other, int64_t place) {
      const F c = load_as(t.type, at(cosine, place, size), count), s = load_as(t.type, at(sine, place, size), count);
      const F sum = add(rounded(t.type, mul(own, c)), rounded(t.type, mul(other, s)));
      store_as(t.type, at(y, place, size), sum, count);
    };
    turned(a, sub(zero(), b), i);
    turned(b, a, half + i);
  }
}

static inline void copy(const void* x, void* y, int64_t bytes) {
  const auto* from = static_cast<const uint8_t*>(x);
  auto* to = static_cast<uint8_t*>(y);
  for (int64_t i = 0; i < bytes; ++i) to[i] = from[i];
}

static inline void heads(const Heads& t, int64_t begin, int64_t end) {
  const int size = bytes_of(t.type);
  const int64_t all = t.q + 2 * t.kv;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t batch = token / t.tokens, place = token - batch * t.tokens;
    const int64_t table = batch * t.table_batch + place * t.rotary;
    const void *cosine = at(t.cosine, table, size), *sine = at(t.sine, table, size);
    for (int64_t head = 0; head < all; ++head) {
      const void* x = at(t.x, (token * all + head) * t.dim, size);
      const bool query = head < t.q, key = !query && head < t.q + t.kv;
      void* const out = query ? t.query : key ? t.key : t.value;
      const int64_t own = query ? head : (head - t.q) % t.kv, count = query ? t.q : t.kv;
      void* const y = at(out, ((batch * count + own) * t.tokens + place) * t.dim, size);
      const int64_t plain = query || key ? t.rotary : 0;  // elements from here on are not rotated
      if (plain > 0) rotate(t, x, y, cosine, sine);
      copy(at(x, plain, size), at(y, plain, size), (t.dim - plain) * size);
    }
  }
}

static const BlockKernels kBlockKernels = {.norm = norm, .gated = gated, .heads = heads};

}  // namespace ao::AO_ISA::block
