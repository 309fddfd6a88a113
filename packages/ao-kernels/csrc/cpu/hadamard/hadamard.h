// Hadamard transforms on all threads, and Paley's matrices.
#pragma once
#include <memory>
#include <vector>

#include "kernels.h"

namespace ao {

// Fills in `unit` and `scratch`.
void plan_hadamard(Hadamard& h);

// Fields of `Hadamard` up to `after` are the caller's; the rest is made here. `count` may be 0.
void run_hadamard(const Hadamard& call);

// The greatest order that `paley` makes a matrix of.
constexpr int64_t kGreatestOrder = 1024;

// Paley's matrix of an order by rows, elements ±1, as ao_core.numerics.hadamard has it; null where there is none.
// It is kept for further calls.
std::shared_ptr<const std::vector<float>> paley(int64_t order);

}  // namespace ao
