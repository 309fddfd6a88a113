// Arguments that describe Hadamard transforms, checked.
#pragma once

#include <bit>
#include <cmath>
#include <memory>
#include <vector>

#include "formats.h"
#include "hadamard/hadamard.h"

namespace ao {

using Matrices = std::vector<std::shared_ptr<const std::vector<float>>>;

// `factors` as ao_core.numerics.hadamard_factors gives them: Paley's orders, and a power of two. The matrices stay
// while `kept` lives.
inline void read_factors(const std::vector<int64_t>& factors, bool inverse, Hadamard& h,
                         Matrices& kept) {
  AO_CHECK(!factors.empty() && factors.size() <= kMostFactors + 1, "factors: has ", factors.size(),
           " orders; must have 1 to ", kMostFactors + 1);
  h.power = factors.back();
  AO_CHECK(h.power >= 1 && h.power <= kGreatestSize && std::has_single_bit(static_cast<uint64_t>(h.power)),
           "factors: the last is ", h.power, "; must be a power of two up to 2**40");
  h.block = h.power;
  for (size_t i = factors.size() - 1; i-- > 0;) {
    const int64_t order = factors[i];
    std::shared_ptr<const std::vector<float>> matrix;
    if (order >= 12 && order <= kGreatestOrder) matrix = paley(order);
    AO_CHECK(matrix, "factors: ", order, " is no order of Paley's matrices from 12 to ", kGreatestOrder);
    AO_CHECK(h.block <= kGreatestSize / order, "factors: their product is more than 2**40");
    h.block *= order;
    h.factor[h.factors++] = {matrix->data(), order, inverse ? 1 : order, inverse ? order : 1};
    kept.push_back(std::move(matrix));
  }
  // as ao_core.numerics.hadamard_scales has them
  const int rounds = std::bit_width(static_cast<uint64_t>(h.block - 1));  // log2, rounded up
  const double before = std::ldexp(1.0, -(rounds / 2));
  h.before = static_cast<float>(before);
  h.after = static_cast<float>(1 / (before * std::sqrt(static_cast<double>(h.block))));
}

}  // namespace ao
