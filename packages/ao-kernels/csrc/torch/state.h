// Arguments of the steps of optimizers, checked.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "formats.h"
#include "optim/optim.h"

namespace ao {

using Tensors = std::vector<Tensor>;

// A list with one tensor per parameter, of this dtype, in memory that is worked on in place.
inline void check_list(const char* name, const Tensors& tensors, const Tensors& params, ScalarType dtype,
                       int64_t block) {
  AO_CHECK(tensors.size() == params.size(), name, ": has ", tensors.size(), " tensors; must have ", params.size(),
           ", as `params`");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string one = std::string(name) + "[" + std::to_string(i) + "]";
    check_cpu(one.c_str(), tensors[i]);
    check_dtype(one.c_str(), tensors[i], {dtype});
    const int64_t count = (params[i].numel() + block - 1) / block;
    const std::string of = block == 1 ? "as the parameter" : "one per block of " + std::to_string(block);
    check_numel(one.c_str(), tensors[i], count, of.c_str());
    check_contiguous(one.c_str(), tensors[i]);
    check_aligned(one.c_str(), tensors[i]);
  }
}

// The arguments NAME_table, NAME_steps, NAME_order, NAME_nan and NAME_reach.
inline void read_state(const std::string& name, const Tensor& table, const Tensor& steps, const Tensor& order,
                       int64_t nan_code, double reach, StateFormat& state) {
  const std::string table_name = name + "_table", steps_name = name + "_steps", order_name = name + "_order";
  check_dtype(table_name.c_str(), table, {ScalarType::Float});
  check_numel(table_name.c_str(), table, 256, "one per code of 8 bits");
  check_dtype(steps_name.c_str(), steps, {ScalarType::Int});
  check_numel(steps_name.c_str(), steps, 255, "one less than there are codes");
  check_dtype(order_name.c_str(), order, {ScalarType::Byte});
  check_numel(order_name.c_str(), order, 256, "one per code of 8 bits");
  check_range((name + "_nan").c_str(), nan_code, 0, 255);
  AO_CHECK(reach >= 0x1p-100 && reach <= 0x1p100, name, "_reach=", reach, ": must be positive, from 2**-100 to 2**100");
  const Tensor values = readable(table_name.c_str(), table), keys = readable(steps_name.c_str(), steps);
  const Tensor codes = readable(order_name.c_str(), order);
  const char* problem = make_state(
      static_cast<const float*>(values.const_data_ptr()), static_cast<const int32_t*>(keys.const_data_ptr()),
      static_cast<const uint8_t*>(codes.const_data_ptr()), static_cast<float>(reach), state);
  AO_CHECK(problem == nullptr, steps_name, ": ", problem);
  state.nan_code = static_cast<uint8_t>(nan_code);
}

inline void check_number(const char* name, double value, bool right, const char* what) {
  AO_CHECK(right && std::isfinite(value), name, "=", value, ": must be ", what);
}

}  // namespace ao
