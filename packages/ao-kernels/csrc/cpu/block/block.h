// The two halves of a decoder block: what comes before attention, and what comes after it.
#pragma once
#include "../linear/linear.h"
#include "kernels.h"

namespace ao {

// A norm before a matmul; without a weight there is none.
struct NormWeight {
  const void* weight;
  float eps;
  Gain gain;
};

// y = norm(x) @ weight.T, as after the last block. Of `linear` the weight and the bias are set.
struct NormedProduct {
  const void* x;  // (m, linear.k), contiguous
  void* y;        // (m, linear.n)
  int64_t m;
  NormWeight norm;
  Linear linear;
  Element type;
};
void run_normed_product(const NormedProduct& call);

// Queries, keys and values of normed rows. Of `linear` the weight and the bias are set, of `heads` all but `x`.
struct Qkv {
  const void* x;  // (m, linear.k), contiguous
  int64_t m;
  NormWeight norm;
  Linear linear;
  Heads heads;
};
void run_qkv(const Qkv& call);

// y = residual + x @ output.T (or x itself), and then y + down(gate(...) * up(...)) of y, normed.
struct Mlp {
  const void* x;         // (m, output.k), or (m, gate_up.k) where there is no output projection
  const void* residual;  // (m, gate_up.k); nullptr: there is none, and nothing is added to the end either
  void* y;               // (m, down.n)
  int64_t m;
  bool has_output;
  NormWeight norm;
  Linear output, gate_up, down;  // weights and biases
  Gate gate;
  Element type;
};
void run_mlp(const Mlp& call);

}  // namespace ao
