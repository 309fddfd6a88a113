// What a decoder block does between its matmuls: what an instruction set provides, and what it is told.
#pragma once
#include <stdint.h>

#include "../element.h"

namespace ao {

// How a norm multiplies by its weight, as models differ. r: 1 / rms of the row, in float32.
// rounded: round(x * r) * w; direct: x * r * w in float32; plus_one: x * r * (1 + w) in float32.
enum class Gain : int32_t { rounded, direct, plus_one };
// Activation functions. gelu_tanh: x * sigmoid(2u), which is x * (1 + tanh(u)) / 2.
enum class Gate : int32_t { silu, gelu_tanh };

// A row: h = x + residual, y = h / rms(h) * weight. Results of every operation are rounded to `type`.
struct Norm {
  const void *x, *residual;  // (rows, n); no residual: nullptr, and h is not written
  void *h, *y;               // (rows, n); y is nullptr where nothing but the sum is wanted
  const void* weight;        // (n)
  float eps;
  Gain gain;
  Element type;
  int64_t n;
};

// y = gate(x[: n]) * x[n :] for every row of x.
struct Gated {
  const void* x;  // (rows, 2 n)
  void* y;        // (rows, n)
  Gate gate;
  Element type;
  int64_t n;
};

// Queries, keys and values of every token, taken apart into heads; queries and keys rotated.
struct Heads {
  const void* x;                 // (batch, tokens, (q + 2 kv) * dim)
  void *query, *key, *value;     // (batch, heads, tokens, dim)
  const void *cosine, *sine;     // (batch or 1, tokens, rotary)
  int64_t tokens, q, kv, dim;
  int64_t rotary;                // elements of a head that are rotated, an even number
  int64_t table_batch;           // elements of a table for a batch; 0: all have one
  Element type;
};

struct BlockKernels {
  // rows [begin, end); of `heads`, tokens of the whole batch
  void (*norm)(const Norm&, int64_t begin, int64_t end);
  void (*gated)(const Gated&, int64_t begin, int64_t end);
  void (*heads)(const Heads&, int64_t begin, int64_t end);
};

}  // namespace ao
