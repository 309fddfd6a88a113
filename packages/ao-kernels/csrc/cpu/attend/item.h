// The rows of an item, and what they see.
#pragma once
#include "../hadamard/unit.h"
#include "softmax.h"

namespace ao::AO_ISA::attention {

// The rows of an item: query (first + r / G), head (h * G + r % G).
struct Item {
  int64_t b, h, matrix, first, queries, rows;
};
static inline Item item_at(const Attend& a, int64_t index) {
  Item item{};
  item.matrix = index / a.query_blocks;
  item.b = item.matrix / a.heads, item.h = item.matrix % a.heads;
  item.first = index % a.query_blocks * a.item_queries;
  item.queries = a.queries - item.first < a.item_queries ? a.queries - item.first : a.item_queries;
  item.rows = item.queries * a.group;
  return item;
}

// The tokens that a query sees.
static inline Span seen_by(const Attend& a, const Item& item, int64_t query) {
  const int64_t own = a.tokens - a.queries + query;
  Span seen{0, a.tokens};
  if (a.causal) seen.end = own + 1;
  if (a.window) seen.begin = own - a.window + 1;
  if (a.start && a.start[item.b] > seen.begin) seen.begin = a.start[item.b];
  if (a.stop && a.stop[item.b] < seen.end) seen.end = a.stop[item.b];
  return {seen.begin > 0 ? seen.begin : 0, seen.end < a.tokens ? seen.end : a.tokens};
}

// Memory of a thread.
struct Scratch {
  uint8_t* next;
  template <class T>
  T* take(int64_t count) {
    uint8_t* const p = next;
    next += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(p);
  }
};

// Rows of floats are rotated in place.
static inline void rotate(const Hadamard& rotation, float* rows, int64_t count, int64_t stride, float* scratch) {
  if (rotation.block == 0) return;
  for (int64_t r = 0; r < count; ++r) {
    Hadamard h = rotation;
    h.x = h.y = rows + r * stride;
    AO_ISA::rotation::transform(h, 0, (h.count + h.unit - 1) / h.unit, scratch);
  }
}

// The queries of an item, times `scale`, as rows of `wide` floats with zeros at the end.
static inline void read_queries(const Attend& a, const Item& item, float scale, int64_t wide, float* out) {
  const int64_t size = a.key.size;
  for (int64_t r = 0; r < item.rows; ++r, out += wide) {
    const int64_t place = item.b * a.q_batch + (item.h * a.group + r % a.group) * a.q_head +
                          (item.first + r / a.group) * a.q_token;
    const auto* p = static_cast<const uint8_t*>(a.q) + place * bytes_of(a.type);
    for (int64_t i = 0; i < wide; i += 16) {
      const int64_t left = size - i;
      const F x = left > 0 ? load_as(a.type, p + i * bytes_of(a.type), left < 16 ? static_cast<int>(left) : 16) : zero();
      store(out + i, mul(x, splat(scale)));
    }
  }
}

// q · center of each row, times `scale`.
static inline void center_logits(const Attend& a, const Item& item, const float* q, float scale, int64_t wide,
                                 float* out) {
  const float* const center = a.center ? a.center + item.matrix * a.key.size : nullptr;
  for (int64_t r = 0; r < item.rows; ++r) {
    F total = zero();
    for (int64_t i = 0; center && i < a.key.size; i += 16) {
      const int count = a.key.size - i < 16 ? static_cast<int>(a.key.size - i) : 16;
      total = fma(load(q + r * wide + i), load_as(Element::f32, center + i, count), total);
    }
    out[r] = scale * sum(total);
  }
}

}  // namespace ao::AO_ISA::attention
