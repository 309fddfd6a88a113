// The arguments of attention over a cache, checked.
#pragma once

#include <optional>
#include <vector>

#include "attend/attend.h"
#include "rotation.h"

namespace ao {

// Memory that must live as long as a call.
struct Kept {
  std::vector<Tensor> tensors;
  Matrices matrices;

  const void* read(const char* name, const Tensor& tensor) {
    tensors.push_back(readable(name, tensor));
    return tensors.back().const_data_ptr();
  }
};

// What is known of queries (B, Hq, T, D).
struct Queries {
  ScalarType dtype;
  int64_t batch, heads, tokens, size;
};

// The arguments of the op `attend` after the queries, in its order.
struct AttendTensors {
  const Tensor &key, &key_scale;
  const std::optional<Tensor>& key_zero;
  const Tensor& key_table;
  const std::vector<int64_t>& key_factors;
  const Tensor &value, &value_scale;
  const std::optional<Tensor>& value_zero;
  const Tensor& value_table;
  const std::vector<int64_t>&value_factors, &blocks;
  int64_t value_dim;
  const Tensor& counts;
  const std::optional<Tensor>&tail_key, &tail_value, &center, &start, &stop, &sinks;
  double scale;
  bool causal;
  int64_t window;
  double softcap;
};

// All that `run_attend` needs but the queries and where the result goes. `kept` keeps the memory.
Attend read_attend(const Queries& q, const AttendTensors& t, Kept& kept);

}  // namespace ao
