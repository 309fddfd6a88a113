// Attention over quantized keys and values.
#include <torch/csrc/stable/library.h>

#include "attend_call.h"

namespace ao {
namespace {

constexpr int64_t kGreatestHead = 1024;  // elements of a key or a value

// What codes and scales mean, as Python passes it.
struct Meaning {
  const Tensor& codes;
  const Tensor& scale;
  const std::optional<Tensor>& zero;
  const Tensor& table;
  const std::vector<int64_t>& factors;
  int64_t block_tokens, block_size;
  bool packed;
};

Stored read_stored(const char* name, const Meaning& m, int64_t matrices, int64_t tokens, int64_t size, bool is_key,
                   Kept& kept) {
  Stored s{};
  Dequantize& d = s.coded;
  read_table(m.table, d.format);
  finish_format(d.format);
  d.code_bits = m.packed ? d.format.bits : 8;
  d.row_bytes = packed_size(size, d.code_bits);
  s.tokens = tokens, s.size = size;
  AO_CHECK(m.codes.numel() == matrices * tokens * d.row_bytes && m.codes.element_size() == 1, name, ": codes of shape ",
           shape_text(m.codes), " are not ", matrices * tokens, " rows of ", d.row_bytes, " bytes");
  check_range("block of tokens", m.block_tokens, 1, tokens);
  check_range("block of elements", m.block_size, 1, size);
  d.blocks = blocks_of(matrices, tokens, size, m.block_tokens, m.block_size);
  const int64_t count = matrices * d.blocks.bands * d.blocks.groups;
  d.codes = static_cast<const uint8_t*>(kept.read(name, m.codes));
  d.scale_type = scale_of("scale", m.scale);
  check_numel("scale", m.scale, count, "one per block");
  d.scale = kept.read("scale", m.scale);
  if (m.zero) {
    d.zero_type = zero_of("zero_point", *m.zero);
    check_numel("zero_point", *m.zero, count, "one per block");
    d.zero = kept.read("zero_point", *m.zero);
  }
  // a transform of order 1 is none
  if (!m.factors.empty() && m.factors != std::vector<int64_t>{1}) {
    read_factors(m.factors, !is_key, s.rotation, kept.matrices);
    AO_CHECK(size % s.rotation.block == 0, name, ": its ", size, " elements are no multiple of ", s.rotation.block,
             ", the product of the factors");
    s.rotation.count = size;
    s.rotation.type = Element::f32;
  }
  choose_grid(s, is_key);
  return s;
}

Tail read_tail(const char* name, const std::optional<Tensor>& tail, const Queries& q, int64_t heads, int64_t size,
               Kept& kept) {
  if (!tail) return {};
  check_dtype(name, *tail, {q.dtype});
  check_dim(name, *tail, 4);
  check_shape(name, *tail, {q.batch, heads, tail->size(2), size});
  return {kept.read(name, *tail), tail->size(2)};
}

const int64_t* read_places(const char* name, const std::optional<Tensor>& places, int64_t count, Kept& kept) {
  if (!places) return nullptr;
  check_dtype(name, *places, {ScalarType::Long});
  check_shape(name, *places, {count});
  return static_cast<const int64_t*>(kept.read(name, *places));
}

const float* read_floats(const char* name, const std::optional<Tensor>& numbers, int64_t count, Kept& kept) {
  if (!numbers) return nullptr;
  check_dtype(name, *numbers, {ScalarType::Float});
  check_numel(name, *numbers, count, "one for each");
  return static_cast<const float*>(kept.read(name, *numbers));
}

}  // namespace

Attend read_attend(const Queries& q, const AttendTensors& t, Kept& kept) {
  Attend a{};
  a.type = *element_of(q.dtype);
  check_dim("key", t.key, 4);
  check_cpu("key", t.key);
  const int64_t heads = t.key.size(1), tokens = t.key.size(2);
  AO_CHECK(t.key.size(0) == q.batch, "key: has a batch of ", t.key.size(0), "; must be ", q.batch, ", that of q");
  check_range("q: elements of a head", q.size, 1, kGreatestHead);
  check_range("value_dim", t.value_dim, 1, kGreatestHead);
  AO_CHECK(heads > 0 && q.heads % heads == 0, "q: has ", q.heads, " heads; must be a multiple of ", heads);
  const std::vector<int64_t>& blocks = t.blocks;
  AO_CHECK(blocks.size() == 6, "blocks: has ", blocks.size(), " numbers; must have 6");
  check_range("window", t.window, 0, int64_t{1} << 40);
  const int64_t matrices = q.batch * heads;
  a.batch = q.batch, a.heads = heads, a.group = q.heads / heads, a.queries = q.tokens;
  if (q.batch * q.heads * q.tokens == 0) return a;
  const Meaning of_key{t.key, t.key_scale, t.key_zero, t.key_table, t.key_factors, blocks[0], blocks[1], blocks[2] != 0};
  const Meaning of_value{t.value,  t.value_scale, t.value_zero, t.value_table, t.value_factors,
                         blocks[3], blocks[4],     blocks[5] != 0};
  a.key = read_stored("key", of_key, matrices, tokens, q.size, true, kept);
  a.value = read_stored("value", of_value, matrices, tokens, t.value_dim, false, kept);
  AO_CHECK(t.tail_key.has_value() == t.tail_value.has_value(), "tail_key, tail_value: must both be there, or none");
  a.tail_key = read_tail("tail_key", t.tail_key, q, heads, q.size, kept);
  a.tail_value = read_tail("tail_value", t.tail_value, q, heads, t.value_dim, kept);
  AO_CHECK(a.tail_key.slots == a.tail_value.slots, "tail_value: has ", a.tail_value.slots, " slots; must have ",
           a.tail_key.slots);
  const int64_t* const both = read_places("counts", t.counts, 2, kept);
  a.tokens = both[0], a.coded = both[1];
  AO_CHECK(a.coded >= 0 && a.coded <= a.tokens && a.coded <= tokens && a.tokens - a.coded <= a.tail_key.slots,
           "counts=[", a.tokens, ", ", a.coded, "]: of ", a.tokens, " tokens ", a.coded,
           " are quantized; there is memory for ", tokens, " of those, and for ", a.tail_key.slots, " others");
  a.center = read_floats("center", t.center, matrices * q.size, kept);
  a.start = read_places("start", t.start, q.batch, kept);
  a.stop = read_places("stop", t.stop, q.batch, kept);
  a.sinks = read_floats("sinks", t.sinks, q.heads, kept);
  a.scale = static_cast<float>(t.scale), a.softcap = static_cast<float>(t.softcap);
  a.causal = t.causal, a.window = t.window;
  return a;
}

namespace {

Tensor attend_op(const Tensor& q, const Tensor& key, const Tensor& key_scale, const std::optional<Tensor>& key_zero,
                 const Tensor& key_table, std::vector<int64_t> key_factors, const Tensor& value,
                 const Tensor& value_scale, const std::optional<Tensor>& value_zero, const Tensor& value_table,
                 std::vector<int64_t> value_factors, std::vector<int64_t> blocks, int64_t value_dim, const Tensor& counts,
                 const std::optional<Tensor>& tail_key, const std::optional<Tensor>& tail_value,
                 const std::optional<Tensor>& center, const std::optional<Tensor>& start,
                 const std::optional<Tensor>& stop, const std::optional<Tensor>& sinks, double scale, bool causal,
                 int64_t window, double softcap) {
  element_of("q", q);
  check_dim("q", q, 4);
  Kept kept;
  const Queries queries{q.scalar_type(), q.size(0), q.size(1), q.size(2), q.size(3)};
  Attend a = read_attend(queries,
                         {key, key_scale, key_zero, key_table, key_factors, value, value_scale, value_zero, value_table,
                          value_factors, blocks, value_dim, counts, tail_key, tail_value, center, start, stop, sinks,
                          scale, causal, window, softcap},
                         kept);
  Tensor y = make({q.size(0), q.size(1), q.size(2), value_dim}, q.scalar_type());
  if (y.numel() == 0) return y;
  check_aligned("q", q);
  const bool in_rows = q.stride(3) == 1;
  const Tensor rows = in_rows ? q : torch::stable::contiguous(q);
  a.q = rows.const_data_ptr();
  a.q_batch = rows.stride(0), a.q_head = rows.stride(1), a.q_token = rows.stride(2);
  a.y = y.mutable_data_ptr();
  run_attend(a);
  return y;
}

}  // namespace
}  // namespace ao

// `blocks`: tokens and elements of a block of keys, whether their codes are packed; the same of values.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "attend(Tensor q, Tensor key, Tensor key_scale, Tensor? key_zero, Tensor key_table, int[] key_factors, "
      "Tensor value, Tensor value_scale, Tensor? value_zero, Tensor value_table, int[] value_factors, int[] blocks, "
      "int value_dim, Tensor counts, Tensor? tail_key, Tensor? tail_value, Tensor? center, Tensor? start, "
      "Tensor? stop, Tensor? sinks, float scale, bool causal, int window, float softcap) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) { m.impl("attend", TORCH_BOX(&ao::attend_op)); }
