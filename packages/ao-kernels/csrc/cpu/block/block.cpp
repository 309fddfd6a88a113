#include "block.h"

#include <algorithm>
#include <utility>

#include "../isa.h"
#include "../memory.h"
#include "../parallel.h"

namespace ao {
namespace {

// Elements that are worth a thread.
constexpr int64_t kGrain = 1 << 15;

// Not those of the matmuls, which run in between.
thread_local ThreadWorkspace kept_rows;

// All rows, cut into parts for threads; f(begin, end).
template <class F>
void for_rows(int64_t m, int64_t n, const F& f) {
  parallel_for(0, m, std::max<int64_t>(1, kGrain / n), f);
}

void multiply(Linear t, const void* x, void* y, int64_t m, Element type) {
  t.x = x, t.y = y, t.m = m, t.type = type;
  t.x_stride = t.k, t.y_stride = t.n;
  run_linear(t);
}

void run_norm(const NormWeight& by, Norm t, int64_t m) {
  t.weight = by.weight, t.eps = by.eps, t.gain = by.gain;
  for_rows(m, t.n, [&](int64_t b, int64_t e) { isa().block.norm(t, b, e); });
}

// Bytes of rows in between that are kept at a time.
constexpr int64_t kKeptBytes = 24 << 20;

// f(begin, end) for parts of the rows, one after the other, that fit.
template <class F>
void in_passes(int64_t m, int64_t row_bytes, const F& f) {
  const int64_t passes = m / (kKeptBytes / row_bytes + 1) + 1;
  for (int64_t p = 0; p < passes; ++p) {
    const Rows rows = rows_of(m, passes, p);
    f(rows.begin, rows.end);
  }
}

const uint8_t* after(const void* p, int64_t bytes) { return static_cast<const uint8_t*>(p) + bytes; }
uint8_t* after(void* p, int64_t bytes) { return static_cast<uint8_t*>(p) + bytes; }

// Consecutive pieces of a workspace.
struct Pieces {
  uint8_t* next;
  uint8_t* take(int64_t bytes) { return std::exchange(next, next + aligned(bytes)); }
};

}  // namespace

namespace {

// Bytes of normed rows.
int64_t normed_bytes(const NormedProduct& call) {
  return call.norm.weight ? aligned(call.m * call.linear.k * bytes_of(call.type)) : 0;
}

// `memory` is for the normed rows.
void multiply_normed(const NormedProduct& call, void* memory) {
  const void* x = call.x;
  if (call.norm.weight) {
    Norm t{};
    t.x = x, t.y = memory, t.type = call.type, t.n = call.linear.k;
    run_norm(call.norm, t, call.m);
    x = memory;
  }
  multiply(call.linear, x, call.y, call.m, call.type);
}

void make_qkv(const Qkv& call, int64_t begin, int64_t end) {
  const Element type = call.heads.type;
  const int64_t size = bytes_of(type), m = end - begin, k = call.linear.k * size, n = call.linear.n * size;
  NormedProduct product{after(call.x, begin * k), nullptr, m, call.norm, call.linear, type};
  const int64_t normed = normed_bytes(product);
  Pieces pieces{kept_rows.get(normed + aligned(m * n))};
  uint8_t* const memory = pieces.take(normed);
  uint8_t* const rows = pieces.take(m * n);
  product.y = rows;
  multiply_normed(product, memory);
  Heads heads = call.heads;
  heads.x = rows - begin * n;  // that of row 0, were it kept
  for_rows(m, call.linear.n, [&](int64_t b, int64_t e) { isa().block.heads(heads, begin + b, begin + e); });
}

void make_mlp(const Mlp& call) {
  const int64_t size = bytes_of(call.type), m = call.m, k = call.gate_up.k, n = call.down.k;
  const int64_t row = m * k * size, wide = m * n * size;
  Pieces pieces{kept_rows.get(3 * aligned(row) + 3 * aligned(wide))};
  const void* h = call.x;
  if (call.has_output) {
    uint8_t* const projected = pieces.take(row);
    multiply(call.output, call.x, projected, m, call.type);
    h = projected;
  }
  const void* x = h;
  if (call.residual || call.norm.weight) {
    Norm t{};
    t.x = h, t.residual = call.residual, t.type = call.type, t.n = k;
    if (call.residual) t.h = pieces.take(row);
    if (call.norm.weight) t.y = pieces.take(row);
    run_norm(call.norm, t, m);
    if (call.residual) h = t.h;
    x = call.norm.weight ? t.y : h;
  }
  Gated gated{.x = pieces.take(2 * wide), .y = pieces.take(wide), .gate = call.gate, .type = call.type, .n = n};
  multiply(call.gate_up, x, const_cast<void*>(gated.x), m, call.type);
  for_rows(m, 2 * n, [&](int64_t b, int64_t e) { isa().block.gated(gated, b, e); });
  multiply(call.down, gated.y, call.y, m, call.type);
  if (!call.residual) return;
  Norm sum{};
  sum.x = call.y, sum.residual = h, sum.h = call.y, sum.type = call.type, sum.n = k;
  for_rows(m, k, [&](int64_t b, int64_t e) { isa().block.norm(sum, b, e); });
}

// Multiplications of all matmuls that are worth a team.
constexpr int64_t kWorth = 1 << 17;

int64_t work_of(const Linear& t) { return t.n * t.k; }

}  // namespace

void run_normed_product(const NormedProduct& call) {
  if (call.m == 0) return;
  multiply_normed(call, kept_rows.get(normed_bytes(call)));
}

void run_qkv(const Qkv& call) {
  if (call.m == 0) return;
  const int64_t row_bytes = (call.linear.k + call.linear.n) * bytes_of(call.heads.type);
  const auto make = [&] { in_passes(call.m, row_bytes, [&](int64_t b, int64_t e) { make_qkv(call, b, e); }); };
  if (call.m * work_of(call.linear) <= kWorth) return make();
  with_team(make);
}

void run_mlp(const Mlp& call) {
  if (call.m == 0) return;
  const int64_t work = work_of(call.gate_up) + work_of(call.down) + (call.has_output ? work_of(call.output) : 0);
  const int64_t size = bytes_of(call.type), k = call.gate_up.k;
  const auto make = [&] {
    in_passes(call.m, 3 * (k + call.down.k) * size, [&](int64_t begin, int64_t end) {
      Mlp part = call;
      part.m = end - begin;
      part.x = after(call.x, begin * (call.has_output ? call.output.k : k) * size);
      part.y = after(call.y, begin * call.down.n * size);
      if (call.residual) part.residual = after(call.residual, begin * k * size);
      make_mlp(part);
    });
  };
  if (call.m * work <= kWorth) return make();
  with_team(make);
}

}  // namespace ao
