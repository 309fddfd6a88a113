// Hadamard transforms of activations.
#include "hadamard/hadamard.h"

#include <torch/csrc/stable/library.h>

#include <bit>
#include <cmath>
#include <vector>

#include "formats.h"

namespace ao {
namespace {

// `factors` as ao_core.numerics.hadamard_factors gives them: Paley's orders, and a power of two. The matrices stay
// while `kept` lives.
void read_factors(const std::vector<int64_t>& factors, bool inverse, Hadamard& h,
                  std::vector<std::shared_ptr<const std::vector<float>>>& kept) {
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
}

Tensor hadamard_op(const Tensor& x, std::vector<int64_t> factors, bool inverse) {
  Hadamard h{};
  h.type = element_of("x", x);
  AO_CHECK(x.dim() >= 1, "x: has no dimension to transform along");
  std::vector<std::shared_ptr<const std::vector<float>>> kept;
  read_factors(factors, inverse, h, kept);
  const int64_t columns = x.size(x.dim() - 1);
  AO_CHECK(columns % h.block == 0, "x: has shape ", shape_text(x), "; its last dimension must be a multiple of ",
           h.block, ", the product of `factors`");
  // as ao_core.numerics.hadamard_scales has them
  const int rounds = std::bit_width(static_cast<uint64_t>(h.block - 1));  // log2, rounded up
  const double before = std::ldexp(1.0, -(rounds / 2));
  h.before = static_cast<float>(before);
  h.after = static_cast<float>(1 / (before * std::sqrt(static_cast<double>(h.block))));
  const Tensor from = readable("x", x);
  Tensor y = make_like(x, 0, {}, x.scalar_type());
  h.x = from.const_data_ptr();
  h.y = y.mutable_data_ptr();
  h.count = x.numel();
  run_hadamard(h);
  return y;
}

}  // namespace
}  // namespace ao

// H x / sqrt(n) of every n elements of the last dimension, or with `inverse` the transposed matrix; n: the product
// of `factors`.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) { m.def("hadamard(Tensor x, int[] factors, bool inverse) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) { m.impl("hadamard", TORCH_BOX(&ao::hadamard_op)); }
