// Hadamard transforms of activations.
#include <torch/csrc/stable/library.h>

#include "rotation.h"

namespace ao {
namespace {

Tensor hadamard_op(const Tensor& x, std::vector<int64_t> factors, bool inverse) {
  Hadamard h{};
  h.type = element_of("x", x);
  AO_CHECK(x.dim() >= 1, "x: has no dimension to transform along");
  Matrices kept;
  read_factors(factors, inverse, h, kept);
  const int64_t columns = x.size(x.dim() - 1);
  AO_CHECK(columns % h.block == 0, "x: has shape ", shape_text(x), "; its last dimension must be a multiple of ",
           h.block, ", the product of `factors`");
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
