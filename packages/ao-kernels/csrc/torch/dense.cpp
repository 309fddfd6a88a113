// Matmuls with dense weights, whose rows do not depend on each other.
#include <torch/csrc/stable/library.h>

#include "dense/dense.h"
#include "product.h"

namespace ao {
namespace {

Tensor dense_linear_op(const Tensor& x, const Tensor& weight, const Optional& bias) {
  check_x(x);
  check_dim("weight", weight, 2);
  check_dtype("weight", weight, {x.scalar_type()});
  const int64_t n = weight.size(0), k = weight.size(1);
  AO_CHECK(x.size(x.dim() - 1) == k, "x: has shape ", shape_text(x), "; must end with ", k, ", as weight");
  std::vector<Tensor> kept;
  const auto read = [&](const char* name, const Tensor& tensor) {
    kept.push_back(readable(name, tensor));
    return kept.back().const_data_ptr();
  };
  Dense call{};
  call.type = element_of("x", x);
  if (bias) {
    check_dtype("bias", *bias, {x.scalar_type()});
    check_numel("bias", *bias, n, "one per row of the weight");
    call.bias = read("bias", *bias);
  }
  call.x = read("x", x), call.w = read("weight", weight);
  Tensor y = make_like(x, 1, {n}, x.scalar_type());
  call.y = y.mutable_data_ptr();
  call.m = k ? x.numel() / k : 0, call.n = n, call.k = k, call.x_stride = k;
  run_dense(call);
  return y;
}

}  // namespace
}  // namespace ao

STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def("dense_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) { m.impl("dense_linear", TORCH_BOX(&ao::dense_linear_op)); }
