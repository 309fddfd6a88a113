// Steps of optimizers, on lists of tensors.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "state.h"

namespace ao {
namespace {

// The lists of a step, and what the ops have in common; v is null where there is one moment alone.
struct Lists {
  const Tensors &params, &grads, &m, &m_scales;
  const Tensors *v = nullptr, *v_scales = nullptr;
};

// Checks everything and fills in what all steps are told, but for the formats; returns the tensors.
std::vector<StepTensor> read_step(const Lists& lists, double lr, double beta1, double beta2, double decay,
                                  bool maximize, std::optional<int64_t> seed, OptimStep& s) {
  const auto& [params, grads, m, m_scales, v, v_scales] = lists;
  check_number("lr", lr, true, "finite");
  check_number("beta1", beta1, beta1 >= 0 && beta1 < 1, "from 0 to below 1");
  check_number("beta2", beta2, beta2 >= 0 && beta2 < 1, "from 0 to below 1");
  check_number("weight_decay", decay, true, "finite");
  if (params.empty()) {
    AO_CHECK(grads.empty(), "grads: has ", grads.size(), " tensors; must have 0, as `params`");
  }
  for (size_t i = 0; i < params.size(); ++i) {
    check_dtype("params", params[i], {ScalarType::Float, ScalarType::BFloat16});
  }
  const ScalarType dtype = params.empty() ? ScalarType::Float : params[0].scalar_type();
  check_list("params", params, params, dtype, 1);
  check_list("grads", grads, params, dtype, 1);
  check_list("m", m, params, ScalarType::Byte, 1);
  check_list("m_scales", m_scales, params, ScalarType::Float, kStateBlock);
  if (v) {
    check_list("v", *v, params, ScalarType::Byte, 1);
    check_list("v_scales", *v_scales, params, ScalarType::Float, kStateBlock);
  }
  s.type = dtype == ScalarType::Float ? Element::f32 : Element::bf16;
  s.size = static_cast<int64_t>(params.size());
  s.beta1 = static_cast<float>(beta1), s.rest1 = static_cast<float>(maximize ? beta1 - 1 : 1 - beta1);
  s.beta2 = static_cast<float>(beta2), s.rest2 = static_cast<float>(1 - beta2);
  s.stochastic = seed.has_value() && s.type == Element::bf16;
  s.seed = static_cast<uint64_t>(seed.value_or(0));
  std::vector<StepTensor> tensors(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    tensors[i] = {params[i].mutable_data_ptr(),
                  grads[i].const_data_ptr(),
                  static_cast<uint8_t*>(m[i].mutable_data_ptr()),
                  v ? static_cast<uint8_t*>((*v)[i].mutable_data_ptr()) : nullptr,
                  static_cast<float*>(m_scales[i].mutable_data_ptr()),
                  v ? static_cast<float*>((*v_scales)[i].mutable_data_ptr()) : nullptr,
                  params[i].numel(),
                  0};
  }
  return tensors;
}

void adam_step_op(const Tensors& params, const Tensors& grads, const Tensors& m, const Tensors& m_scales,
                  const Tensors& v, const Tensors& v_scales, const Tensor& m_table, const Tensor& m_steps,
                  const Tensor& m_order, int64_t m_nan, double m_reach, const Tensor& v_table, const Tensor& v_steps,
                  const Tensor& v_order, int64_t v_nan, double v_reach, double lr, double beta1, double beta2,
                  double eps, double weight_decay, int64_t step, bool decoupled, bool maximize,
                  std::optional<int64_t> seed) {
  Adam a{};
  read_state("m", m_table, m_steps, m_order, m_nan, m_reach, a.m);
  read_state("v", v_table, v_steps, v_order, v_nan, v_reach, a.v);
  check_number("eps", eps, eps >= 0, "0 or positive");
  check_range("step", step, 1, kGreatestSize);
  const Lists lists{params, grads, m, m_scales, &v, &v_scales};
  std::vector<StepTensor> tensors = read_step(lists, lr, beta1, beta2, weight_decay, maximize, seed, a);
  a.decay = static_cast<float>(decoupled ? 1 - lr * weight_decay : 1.0);
  a.l2 = static_cast<float>(decoupled ? 0.0 : maximize ? -weight_decay : weight_decay);
  const double t = static_cast<double>(step);
  a.rate = static_cast<float>(lr / (1 - std::pow(beta1, t)));
  a.unbias = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, t)));
  a.eps = static_cast<float>(eps);
  adam_step(a, tensors.data());
}

void lion_step_op(const Tensors& params, const Tensors& grads, const Tensors& m, const Tensors& m_scales,
                  const Tensor& m_table, const Tensor& m_steps, const Tensor& m_order, int64_t m_nan, double m_reach,
                  double lr, double beta1, double beta2, double weight_decay, bool maximize,
                  std::optional<int64_t> seed) {
  Lion s{};
  read_state("m", m_table, m_steps, m_order, m_nan, m_reach, s.m);
  std::vector<StepTensor> tensors =
      read_step({params, grads, m, m_scales}, lr, beta1, beta2, weight_decay, maximize, seed, s);
  if (maximize) s.rest2 = -s.rest2;  // the moment follows the gradient, not its square
  s.decay = static_cast<float>(1 - lr * weight_decay);
  s.rate = static_cast<float>(lr);
  lion_step(s, tensors.data());
}

}  // namespace
}  // namespace ao

// One step for all tensors, in place. Moments: `m` and `v` are codes of blocks of 256 elements, with a scale
// for each block, in a format told as `encode` is told one. seed: of the rounding of bfloat16 parameters.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "adam_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] m, Tensor(c!)[] m_scales, Tensor(d!)[] v, "
      "Tensor(e!)[] v_scales, Tensor m_table, Tensor m_steps, Tensor m_order, int m_nan, float m_reach, "
      "Tensor v_table, Tensor v_steps, Tensor v_order, int v_nan, float v_reach, float lr, float beta1, float beta2, "
      "float eps, float weight_decay, int step, bool decoupled, bool maximize, int? seed) -> ()");
  m.def(
      "lion_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] m, Tensor(c!)[] m_scales, Tensor m_table, "
      "Tensor m_steps, Tensor m_order, int m_nan, float m_reach, float lr, float beta1, float beta2, "
      "float weight_decay, bool maximize, int? seed) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("adam_step", TORCH_BOX(&ao::adam_step_op));
  m.impl("lion_step", TORCH_BOX(&ao::lion_step_op));
}
