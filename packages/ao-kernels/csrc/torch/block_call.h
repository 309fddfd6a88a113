// Weights and norms of decoder blocks, as ops are told of them, checked.
#pragma once

#include <algorithm>
#include <string>

#include "block/block.h"
#include "product.h"

namespace ao {

using Numbers = std::vector<int64_t>;

// Errors of a weight name the arguments of the op, which begin with the weight's name.
[[noreturn]] inline void fail_for(const std::string& name, const std::string& problem) {
  constexpr const char* kTensors[] = {"qdata", "scale",        "scale_outer", "zero_point",
                                      "offset", "offset_outer", "rowsum",      "table"};
  const std::string argument = problem.substr(0, problem.find_first_of(":= "));
  const bool tensor = std::find(std::begin(kTensors), std::end(kTensors), argument) != std::end(kTensors);
  fail(name, tensor ? "" : "numbers: ", problem);
}

// A weight as the ops are told of it, in their order.
struct WeightTensors {
  std::string name;  // that arguments begin with
  const Optional &qdata, &scale, &scale_outer, &zero, &offset, &offset_outer, &rowsum, &table, &bias;
  const Numbers& numbers;  // n, bits, group, span, kind, act

  void read(Product& p, int64_t k, ScalarType dtype) const {
    AO_CHECK(qdata && scale && table, name, "qdata: must be given, as must scale and table");
    AO_CHECK(numbers.size() == 6, name, "numbers: are ", numbers.size(), "; must be 6");
    try {
      const QuantParamTensors affine{*scale, scale_outer, zero, offset, offset_outer, numbers[3]};
      p.read_weight(*qdata, affine, rowsum, *table, numbers[0], k, numbers[1], numbers[2], numbers[4], numbers[5]);
    } catch (const std::runtime_error& error) {
      fail_for(name, error.what());
    }
    if (!bias) return;
    const std::string own = name + "bias";
    check_dtype(own.c_str(), *bias, {dtype});
    check_numel(own.c_str(), *bias, numbers[0], "one per row of the weight");
    p.call.bias = p.keep(readable(own.c_str(), *bias));
  }
};

// `kept` keeps the memory of what is returned.
inline NormWeight read_norm(const Optional& norm, double eps, int64_t gain, int64_t k, ScalarType dtype, Tensor& kept) {
  check_range("gain", gain, 0, 2);
  AO_CHECK(eps >= 0, "eps=", eps, ": must not be negative");
  if (!norm) return {};
  check_dtype("norm", *norm, {dtype});
  check_numel("norm", *norm, k, "one per column of x");
  kept = readable("norm", *norm);
  return {kept.const_data_ptr(), static_cast<float>(eps), static_cast<Gain>(gain)};
}

}  // namespace ao
