// Sums of errors for candidates of scales.
#include <torch/csrc/stable/library.h>

#include "formats.h"
#include "sums/sums.h"

namespace ao {
namespace {

// A float32 tensor of a shape, contiguous.
Tensor floats(const char* name, const Tensor& tensor, int64_t rows, int64_t columns) {
  check_dtype(name, tensor, {ScalarType::Float});
  check_shape(name, tensor, {rows, columns});
  return readable(name, tensor);
}

Tensor scale_sums_op(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero,
                     const std::optional<Tensor>& importance, std::optional<double> power, const Tensor& table,
                     const Tensor& steps, const Tensor& order, int64_t nan_code, int64_t rule) {
  ScaleSums s{};
  s.type = element_of("x", x);
  check_dim("x", x, 2);
  check_dim("scale", scale, 2);
  read_format(table, steps, order, nan_code, rule, s.format);
  s.rows = x.size(0), s.columns = x.size(1), s.candidates = scale.size(1);
  const Tensor dense = readable("x", x), by = floats("scale", scale, s.rows, s.candidates);
  std::optional<Tensor> point, weights;
  if (zero) point = floats("zero_point", *zero, s.rows, s.candidates);
  if (importance) weights = floats("importance", *importance, s.rows, s.columns);
  AO_CHECK(!power || (*power > 0 && *power <= 2), "power=", *power, ": must be above 0 and at most 2");
  s.power = power ? static_cast<float>(*power) : 0.0f;
  Tensor sums = make({power ? 4 : 3, s.rows, s.candidates}, ScalarType::Float);
  if (sums.numel() == 0) return sums;
  s.x = dense.const_data_ptr();
  s.scale = static_cast<const float*>(by.const_data_ptr());
  s.zero = point ? static_cast<const float*>(point->const_data_ptr()) : nullptr;
  s.importance = weights ? static_cast<const float*>(weights->const_data_ptr()) : nullptr;
  s.sums = static_cast<float*>(sums.mutable_data_ptr());
  scale_sums(s);
  return sums;
}

}  // namespace
}  // namespace ao

// x, importance: (rows, columns); scale, zero_point: (rows, candidates). The result is (3, or 4 with a power, rows,
// candidates), see `ScaleSums`; formats are as those of `encode`.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "scale_sums(Tensor x, Tensor scale, Tensor? zero_point, Tensor? importance, float? power, Tensor table, "
      "Tensor steps, Tensor order, int nan_code, int rule) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) { m.impl("scale_sums", TORCH_BOX(&ao::scale_sums_op)); }
