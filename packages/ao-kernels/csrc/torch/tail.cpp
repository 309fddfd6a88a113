// Tokens that are appended to a cache of keys and values: to its exact tail, and as codes.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cache.h"
#include "rotation.h"

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

// What codes and scales of keys or values mean, as Python passes it.
struct Coding {
  const Tensor& codes;
  const Tensor& scale;
  const std::optional<Tensor>& zero;
  const Tensor& table;
  const Tensor& steps;
  const Tensor& order;
  const std::vector<int64_t>& numbers;  // nan_code, rule, tokens and elements of a block, ZeroKind, MxMode, packed
  double reach;
  const std::vector<int64_t>& factors;
};

void check_written(const char* name, const Tensor& tensor, int64_t count) {
  check_cpu(name, tensor);
  check_contiguous(name, tensor);
  check_numel(name, tensor, count, "one for each");
}

EncodeSide read_side(const char* name, const Coding& m, int64_t matrices, int64_t tokens, int64_t size, Matrices& kept) {
  EncodeSide s{};
  s.size = size;
  Quantize& q = s.coded;
  AO_CHECK(m.numbers.size() == 7, name, ": has ", m.numbers.size(), " numbers; must have 7");
  read_format(m.table, m.steps, m.order, m.numbers[0], m.numbers[1], q.format);
  check_range("tokens of a block", m.numbers[2], 1, tokens);
  check_range("elements of a block", m.numbers[3], 1, size);
  check_range("zero_point", m.numbers[4], 0, 3);
  check_range("mx_mode", m.numbers[5], 0, 3);
  AO_CHECK(m.reach >= 0x1p-100 && m.reach <= 0x1p100, "quant_max=", m.reach, ": must be from 2**-100 to 2**100");
  q.blocks = blocks_of(matrices, tokens, size, m.numbers[2], m.numbers[3]);
  q.zero_kind = static_cast<ZeroKind>(m.numbers[4]);
  q.mx_mode = static_cast<MxMode>(m.numbers[5]);
  q.code_bits = m.numbers[6] ? q.format.bits : 8;
  q.row_bytes = packed_size(size, q.code_bits);
  q.scale_type = scale_of("scale", m.scale);
  AO_CHECK(m.zero.has_value() == (q.zero_kind != ZeroKind::none), name, ": zero points must be there as zero_point says");
  q.zero_type = m.zero ? zero_of("zero_point", *m.zero) : Zero::none;
  set_reach(q, m.reach);
  const int64_t count = matrices * q.blocks.bands * q.blocks.groups;
  check_written(name, m.codes, matrices * tokens * q.row_bytes), check_written("scale", m.scale, count);
  if (m.zero) check_written("zero_point", *m.zero, count);
  q.codes = static_cast<uint8_t*>(m.codes.mutable_data_ptr());
  q.scale = m.scale.mutable_data_ptr();
  q.zero = m.zero ? m.zero->mutable_data_ptr() : nullptr;
  if (!m.factors.empty() && m.factors != std::vector<int64_t>{1}) {
    read_factors(m.factors, false, s.rotation, kept);
    AO_CHECK(size % s.rotation.block == 0, name, ": its ", size, " elements are no multiple of ", s.rotation.block);
  }
  return s;
}

// range: tokens there were, the first one that is encoded, and the one after the last. False: see `encode_tokens`.
bool encode_tokens_op(const Tensor& key, const Tensor& key_scale, const std::optional<Tensor>& key_zero,
                      const Tensor& key_table, const Tensor& key_steps, const Tensor& key_order,
                      std::vector<int64_t> key_numbers, double key_reach, std::vector<int64_t> key_factors,
                      const Tensor& value, const Tensor& value_scale, const std::optional<Tensor>& value_zero,
                      const Tensor& value_table, const Tensor& value_steps, const Tensor& value_order,
                      std::vector<int64_t> value_numbers, double value_reach, std::vector<int64_t> value_factors,
                      const Tensor& tail_key, const Tensor& tail_value, const Tensor& new_key, const Tensor& new_value,
                      const std::optional<Tensor>& center, int64_t tokens, int64_t begin, int64_t end) {
  EncodeTokens call{};
  call.type = element_of("new_key", new_key);
  check_tail("tail_key", tail_key, "new_key", new_key);
  check_tail("tail_value", tail_value, "new_value", new_value);
  check_dim("key", key, 4);
  const int64_t room = key.size(2), added = new_key.size(2), slots = tail_key.size(2);
  const int64_t matrices = new_key.size(0) * new_key.size(1);
  if (matrices == 0 || begin >= end) return true;
  AO_CHECK(new_value.size(2) == added && tail_value.size(2) == slots && new_value.size(0) * new_value.size(1) == matrices &&
               new_value.scalar_type() == new_key.scalar_type(),
           "value, tail_value: must be of the dtype and have the heads, tokens and slots of keys");
  AO_CHECK(0 <= begin && end <= room && end <= tokens + added && (begin >= tokens || tokens - begin <= slots),
           "tokens=", tokens, ", begin=", begin, ", end=", end, ": with ", added, " new tokens, ", slots,
           " slots and memory for ", room, " these are no tokens of a cache");
  const Coding of_key{key, key_scale, key_zero, key_table, key_steps, key_order, key_numbers, key_reach, key_factors};
  const Coding of_value{value, value_scale, value_zero, value_table, value_steps, value_order, value_numbers,
                        value_reach, value_factors};
  Matrices kept;
  call.key = read_side("key", of_key, matrices, room, new_key.size(3), kept);
  call.value = read_side("value", of_value, matrices, room, new_value.size(3), kept);
  for (const Blocks* blocks : {&call.key.coded.blocks, &call.value.coded.blocks}) {
    const char* const problem = why_not_encoded(*blocks, begin, end);
    AO_CHECK(problem == nullptr, "begin=", begin, ", end=", end, ": ", problem);
  }
  std::optional<Tensor> offset;
  if (center) {
    check_dtype("center", *center, {ScalarType::Float});
    check_numel("center", *center, matrices * call.key.size, "one for each element of a key");
    offset = readable("center", *center);
    call.key.center = static_cast<const float*>(offset->const_data_ptr());
  }
  Tensor keys, values;
  call.key.rows = rows_of_tokens(new_key, keys), call.value.rows = rows_of_tokens(new_value, values);
  call.key.tail = tail_key.const_data_ptr(), call.value.tail = tail_value.const_data_ptr();
  call.batch = new_key.size(0), call.heads = new_key.size(1), call.slots = slots;
  call.tokens = tokens, call.begin = begin, call.end = end;
  return encode_tokens(call);
}

}  // namespace
}  // namespace ao

STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "write_tail(Tensor(a!) counts, Tensor(b!) tail_key, Tensor(c!) tail_value, Tensor key, Tensor value, "
      "int coded) -> ()");
  m.def(
      "encode_tokens(Tensor(a!) key, Tensor(b!) key_scale, Tensor(c!)? key_zero, Tensor key_table, Tensor key_steps, "
      "Tensor key_order, int[] key_numbers, float key_reach, int[] key_factors, Tensor(d!) value, "
      "Tensor(e!) value_scale, Tensor(f!)? value_zero, Tensor value_table, Tensor value_steps, Tensor value_order, "
      "int[] value_numbers, float value_reach, int[] value_factors, Tensor tail_key, Tensor tail_value, Tensor new_key, "
      "Tensor new_value, Tensor? center, int tokens, int begin, int end) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("write_tail", TORCH_BOX(&ao::write_tail_op));
  m.impl("encode_tokens", TORCH_BOX(&ao::encode_tokens_op));
}
