// Sums over blocks: errors for candidates of scales, and gradients of scales that are learned.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <tuple>

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

std::tuple<Tensor, Tensor> learned_gradients_op(const Tensor& x, const Tensor& grad, const Tensor& scale,
                                                const std::optional<Tensor>& zero, double reach, const Tensor& table,
                                                const Tensor& steps, const Tensor& order, int64_t nan_code,
                                                int64_t rule) {
  LearnedGradients call{};
  call.type = element_of("x", x), call.grad_type = element_of("grad", grad);
  check_dim("x", x, 2);
  check_shape("grad", grad, {x.size(0), x.size(1)});
  read_format(table, steps, order, nan_code, rule, call.format);
  call.rows = x.size(0), call.columns = x.size(1);
  const Tensor dense = readable("x", x), given = readable("grad", grad), by = floats("scale", scale, call.rows, 1);
  std::optional<Tensor> point;
  if (zero) point = floats("zero_point", *zero, call.rows, 1);
  AO_CHECK(reach >= 0 && reach <= std::numeric_limits<float>::max(), "reach=", reach,
           ": must be finite, and not negative");
  call.low = static_cast<float>(call.format.least - reach);
  call.high = static_cast<float>(call.format.greatest + reach);
  Tensor out = make({call.rows, call.columns}, grad.scalar_type());
  Tensor sums = make({2, call.rows}, ScalarType::Float);
  if (sums.numel() == 0) return {out, sums};
  call.x = dense.const_data_ptr();
  call.grad = given.const_data_ptr();
  call.scale = static_cast<const float*>(by.const_data_ptr());
  call.zero = point ? static_cast<const float*>(point->const_data_ptr()) : nullptr;
  call.out = out.mutable_data_ptr();
  call.sums = static_cast<float*>(sums.mutable_data_ptr());
  learned_gradients(call);
  return {out, sums};
}

}  // namespace
}  // namespace ao

// x, importance: (rows, columns); scale, zero_point: (rows, candidates). The result is (3, or 4 with a power, rows,
// candidates), see `ScaleSums`; formats are as those of `encode`. x, grad: (rows, columns); scale, zero_point:
// (rows, 1). The results are (rows, columns), of the dtype of grad, and (2, rows), see `LearnedGradients`.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "scale_sums(Tensor x, Tensor scale, Tensor? zero_point, Tensor? importance, float? power, Tensor table, "
      "Tensor steps, Tensor order, int nan_code, int rule) -> Tensor");
  m.def(
      "learned_gradients(Tensor x, Tensor grad, Tensor scale, Tensor? zero_point, float reach, Tensor table, "
      "Tensor steps, Tensor order, int nan_code, int rule) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("scale_sums", TORCH_BOX(&ao::scale_sums_op));
  m.impl("learned_gradients", TORCH_BOX(&ao::learned_gradients_op));
}
