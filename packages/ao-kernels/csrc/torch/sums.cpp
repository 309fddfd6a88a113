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

// Factors of all stages, and how many each has.
void read_stages(const Tensor& factors, const Tensor& stages, SearchScales& s) {
  check_dtype("factors", factors, {ScalarType::Float});
  check_dtype("stages", stages, {ScalarType::Int});
  check_dim("stages", stages, 1);
  check_shape("factors", factors, {2, factors.dim() == 2 ? factors.size(1) : 0});
  AO_CHECK(factors.is_contiguous() && stages.is_contiguous(), "factors and stages must be contiguous");
  s.low = static_cast<const float*>(factors.const_data_ptr()), s.high = s.low + factors.size(1);
  s.stages = static_cast<const int32_t*>(stages.const_data_ptr());
  s.stage_count = static_cast<int32_t>(stages.size(0));
  int64_t total = 0;
  for (int32_t i = 0; i < s.stage_count; ++i) {
    AO_CHECK(s.stages[i] >= 0 && s.stages[i] <= factors.size(1), "stages has ", s.stages[i], " factors");
    total += s.stages[i];
  }
  AO_CHECK(total == factors.size(1), "stages has ", total, " factors and factors ", factors.size(1));
}

std::tuple<Tensor, Tensor, Tensor> search_scales_op(
    const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero, const std::optional<Tensor>& importance,
    std::optional<double> power, double gain, const Tensor& factors,
    const Tensor& stages, int64_t fits, int64_t point, ScalarType scale_dtype, ScalarType point_dtype, double least,
    double greatest, double greatest_point, const Tensor& table, const Tensor& steps, const Tensor& order,
    int64_t nan_code, int64_t rule) {
  SearchScales s{};
  ScaleSums& rows = s.rows;
  rows.type = element_of("x", x);
  check_dim("x", x, 2);
  read_format(table, steps, order, nan_code, rule, rows.format);
  rows.rows = x.size(0), rows.columns = x.size(1), rows.candidates = 1;
  const Tensor dense = readable("x", x), by = floats("scale", scale, rows.rows, 1);
  std::optional<Tensor> start, weights;
  AO_CHECK((point != 0) == zero.has_value(), "point=", point, ": zero_point is given for 1 to 3, and for no other");
  AO_CHECK(point >= 0 && point <= 3, "point=", point, ": must be from 0 to 3");
  if (zero) start = floats("zero_point", *zero, rows.rows, 1);
  if (importance) weights = floats("importance", *importance, rows.rows, rows.columns);
  AO_CHECK(!power || (*power > 0 && *power <= 2), "power=", *power, ": must be above 0 and at most 2");
  AO_CHECK(fits >= 0 && fits <= 64, "fits=", fits, ": must be from 0 to 64");
  read_stages(factors, stages, s);
  rows.power = power ? static_cast<float>(*power) : 0.0f;
  s.gain = static_cast<float>(gain), s.fits = static_cast<int32_t>(fits), s.point = static_cast<Point>(point);
  s.scale_type = element_of("scale_dtype", scale_dtype), s.point_type = element_of("point_dtype", point_dtype);
  s.least_scale = static_cast<float>(least), s.greatest_scale = static_cast<float>(greatest);
  s.greatest_point = static_cast<float>(greatest_point);
  AO_CHECK(s.least_scale > 0, "least=", least, ": must be above 0");
  Tensor out = make({rows.rows, 1}, ScalarType::Float), out_zero = make({zero ? rows.rows : 0, 1}, ScalarType::Float);
  Tensor better = make({rows.rows, 1}, ScalarType::Bool);
  if (rows.rows == 0) return {out, out_zero, better};
  rows.x = dense.const_data_ptr();
  rows.scale = static_cast<const float*>(by.const_data_ptr());
  rows.zero = start ? static_cast<const float*>(start->const_data_ptr()) : nullptr;
  rows.importance = weights ? static_cast<const float*>(weights->const_data_ptr()) : nullptr;
  s.scale = static_cast<float*>(out.mutable_data_ptr());
  s.zero = zero ? static_cast<float*>(out_zero.mutable_data_ptr()) : nullptr;
  s.better = static_cast<bool*>(better.mutable_data_ptr());
  search_scales(s);
  return {out, out_zero, better};
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
// candidates), see `ScaleSums`; formats are as those of `encode`. Of `search_scales`, scale, zero_point and the
// results are (rows, 1), factors (2, all of them) those of low and high ends, and `point` is a `Point`. x, grad:
// (rows, columns); scale, zero_point: (rows, 1). The results are (rows, columns), of the dtype of grad, and (2, rows),
// see `LearnedGradients`.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "scale_sums(Tensor x, Tensor scale, Tensor? zero_point, Tensor? importance, float? power, Tensor table, "
      "Tensor steps, Tensor order, int nan_code, int rule) -> Tensor");
  m.def(
      "search_scales(Tensor x, Tensor scale, Tensor? zero_point, Tensor? importance, float? power, "
      "float gain, Tensor factors, Tensor stages, int fits, int point, ScalarType scale_dtype, ScalarType point_dtype, "
      "float least, float greatest, float greatest_point, Tensor table, Tensor steps, Tensor order, int nan_code, "
      "int rule) -> (Tensor, Tensor, Tensor)");
  m.def(
      "learned_gradients(Tensor x, Tensor grad, Tensor scale, Tensor? zero_point, float reach, Tensor table, "
      "Tensor steps, Tensor order, int nan_code, int rule) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("scale_sums", TORCH_BOX(&ao::scale_sums_op));
  m.impl("search_scales", TORCH_BOX(&ao::search_scales_op));
  m.impl("learned_gradients", TORCH_BOX(&ao::learned_gradients_op));
}
