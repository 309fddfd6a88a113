// Tokens that are appended to the exact tail of a cache of keys and values.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cache.h"

namespace ao {
namespace {

void write_tail_op(const Tensor& counts, const Tensor& tail_key, const Tensor& tail_value, const Tensor& key,
                   const Tensor& value, int64_t coded) {
  WriteTail call{};
  call.type = element_of("key", key);
  check_tail("tail_key", tail_key, "key", key);
  check_tail("tail_value", tail_value, "value", value);
  call.batch = key.size(0), call.heads = key.size(1), call.added = key.size(2), call.slots = tail_key.size(2);
  AO_CHECK(value.size(2) == call.added && tail_value.size(2) == call.slots, "value, tail_value: have ", value.size(2),
           " tokens and ", tail_value.size(2), " slots; must have ", call.added, " and ", call.slots,
           ", as those of keys");
  call.counts = writable_counts(counts);
  const int64_t tokens = call.counts[0] + call.added;
  call.coded = std::max(coded, call.counts[1]);
  AO_CHECK(call.counts[0] >= 0 && call.coded >= 0 && call.coded <= tokens && tokens - call.coded <= call.slots,
           "counts=[", call.counts[0], ", ", call.counts[1], "], coded=", coded, ": with ", call.added,
           " new tokens and ", call.slots, " slots these are no counts of a cache");
  Tensor keys, values;
  call.key_size = key.size(3), call.value_size = value.size(3);
  call.key = rows_of_tokens(key, keys), call.value = rows_of_tokens(value, values);
  call.tail_key = tail_key.mutable_data_ptr(), call.tail_value = tail_value.mutable_data_ptr();
  write_tail(call);
}

}  // namespace
}  // namespace ao

STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "write_tail(Tensor(a!) counts, Tensor(b!) tail_key, Tensor(c!) tail_value, Tensor key, Tensor value, "
      "int coded) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) { m.impl("write_tail", TORCH_BOX(&ao::write_tail_op)); }
