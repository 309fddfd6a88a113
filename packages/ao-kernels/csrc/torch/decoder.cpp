// Decoder blocks over a cache, in one call.
#include "block/decoder.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <deque>

#include "attend_call.h"
#include "block_call.h"

namespace ao {
namespace {

using Tensors = std::vector<Tensor>;

// The arguments of all blocks, one after the other.
struct Flat {
  const Tensors &tensors, &caches;
  const Numbers& numbers;
  const std::vector<double>& reals;
  size_t next_tensor = 0, next_cache = 0, next_number = 0, next_real = 0;

  template <class T>
  static const T& take(const char* name, const std::vector<T>& all, size_t& next) {
    AO_CHECK(next < all.size(), name, ": are ", all.size(), ", too few");
    return all[next++];
  }
  const Tensor& tensor() { return take("tensors", tensors, next_tensor); }
  const Tensor& cache() { return take("caches", caches, next_cache); }
  int64_t number() { return take("numbers", numbers, next_number); }
  double real() { return take("reals", reals, next_real); }
  Optional tensor_if(int64_t there) { return there ? Optional(tensor()) : std::nullopt; }
  Numbers count_numbers(int64_t count) {
    check_range("numbers: count", count, 0, 64);
    Numbers found;
    while (count-- > 0) found.push_back(number());
    return found;
  }
  void check_ends() const {
    AO_CHECK(next_tensor == tensors.size() && next_cache == caches.size() && next_number == numbers.size() &&
                 next_real == reals.size(),
             "tensors, caches, numbers, reals: are more than those of all blocks");
  }
};

// What the blocks point to.
struct Memory {
  std::deque<Product> products;
  std::deque<Tensor> norms;
  Kept kept;
};

// Of a weight there is: which of its tensors there are, in bits, its six numbers, and the tensors.
const Linear& read_weight(const char* name, Flat& from, int64_t k, ScalarType dtype, Memory& memory) {
  const int64_t there = from.number();
  const Numbers numbers = from.count_numbers(6);
  std::array<Optional, 9> t;
  for (int i = 0; i < 9; ++i) t[i] = from.tensor_if(there >> i & 1);
  Product& p = memory.products.emplace_back();
  WeightTensors{name, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], numbers}.read(p, k, dtype);
  return p.call;
}

// A gain, epsilon, and the weight; or a gain of -1 and an epsilon, for no norm.
NormWeight read_norm_of(Flat& from, int64_t k, ScalarType dtype, Memory& memory) {
  const int64_t gain = from.number();
  const double eps = from.real();
  const Optional weight = from.tensor_if(gain >= 0);
  return read_norm(weight, eps, std::max<int64_t>(gain, 0), k, dtype, memory.norms.emplace_back());
}

DecoderBlock read_block(Flat& from, const Decoder& call, ScalarType dtype, const Optional& start, const Optional& stop,
                        Memory& memory) {
  DecoderBlock block{};
  const Numbers heads = from.count_numbers(3);
  for (const int64_t number : heads) check_range("heads", number, 1, 1 << 20);
  const int64_t q = heads[0], kv = heads[1], dim = heads[2];
  block.norm = read_norm_of(from, call.width, dtype, memory);
  block.qkv = read_weight("qkv_", from, call.width, dtype, memory);
  AO_CHECK(block.qkv.n == (q + 2 * kv) * dim, "heads: are ", q, " + 2 * ", kv, " of ", dim,
           " elements; the weight has ", block.qkv.n, " rows");
  AO_CHECK(call.rotary.rotary <= dim, "cosine: has ", call.rotary.rotary, " elements for a token; heads have ", dim);
  Mlp& mlp = block.mlp;
  mlp.has_output = true;
  mlp.output = read_weight("output_", from, q * dim, dtype, memory);
  AO_CHECK(mlp.output.n == call.width, "output_numbers: are of ", mlp.output.n, " rows; must have ", call.width);
  mlp.norm = read_norm_of(from, call.width, dtype, memory);
  mlp.gate_up = read_weight("gate_up_", from, call.width, dtype, memory);
  AO_CHECK(mlp.gate_up.n % 2 == 0, "gate_up_numbers: are of ", mlp.gate_up.n, " rows; must have as many for gate as for up");
  mlp.down = read_weight("down_", from, mlp.gate_up.n / 2, dtype, memory);
  AO_CHECK(mlp.down.n == call.width, "down_numbers: are of ", mlp.down.n, " rows; must have ", call.width);
  const int64_t gate = from.number();
  check_range("gate", gate, 0, 1);
  mlp.gate = static_cast<Gate>(gate);

  const int64_t causal = from.number(), window = from.number(), there = from.number();
  const Numbers blocks = from.count_numbers(6), key_factors = from.count_numbers(from.number());
  const Numbers value_factors = from.count_numbers(from.number());
  const double scale = from.real(), softcap = from.real();
  const Tensor &key = from.tensor(), &key_scale = from.tensor();
  const Optional key_zero = from.tensor_if(there & 1);
  const Tensor &key_table = from.tensor(), &value = from.tensor(), &value_scale = from.tensor();
  const Optional value_zero = from.tensor_if(there & 2);
  const Tensor& value_table = from.tensor();
  const Optional center = from.tensor_if(there & 4), sinks = from.tensor_if(there & 8);
  const Tensor& counts = from.cache();
  const Optional tail_key = from.cache(), tail_value = from.cache();
  for (const Optional& tail : {tail_key, tail_value}) {
    check_cpu("tail", *tail);
    check_contiguous("tail", *tail);
  }
  check_contiguous("counts", counts);
  AO_CHECK(key.dim() == 4 && key.size(1) == kv, "key: has shape ", shape_text(key), "; must have ", kv, " heads");
  block.attend = read_attend({dtype, call.batch, q, call.tokens, dim},
                             {key, key_scale, key_zero, key_table, key_factors, value, value_scale, value_zero,
                              value_table, value_factors, blocks, dim, counts, tail_key, tail_value, center, start,
                              stop, sinks, scale, causal != 0, window, softcap},
                             memory.kept);
  const Attend& a = block.attend;
  AO_CHECK(a.tokens - a.coded + call.tokens <= a.tail_key.slots, "counts=[", a.tokens, ", ", a.coded, "]: with ",
           call.tokens, " new tokens there are more than the ", a.tail_key.slots, " slots of the tail");
  block.counts = static_cast<int64_t*>(counts.mutable_data_ptr());
  block.tail_key = tail_key->mutable_data_ptr(), block.tail_value = tail_value->mutable_data_ptr();
  return block;
}

Heads read_rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine, const void* of_cosine, const void* of_sine) {
  const ScalarType dtype = x.scalar_type();
  const int64_t batch = x.size(0), tokens = x.size(1);
  check_dtype("cosine", cosine, {dtype});
  check_dim("cosine", cosine, 3);
  Heads h{};
  const int64_t tables = cosine.size(0);
  h.rotary = cosine.size(2);
  AO_CHECK(tables == 1 || tables == batch, "cosine: has shape ", shape_text(cosine), "; must start with 1 or ", batch);
  AO_CHECK(h.rotary % 2 == 0, "cosine: has ", h.rotary, " elements for a token; must be an even number");
  check_shape("cosine", cosine, {tables, tokens, h.rotary});
  check_dtype("sine", sine, {dtype});
  check_shape("sine", sine, {tables, tokens, h.rotary});
  h.cosine = of_cosine, h.sine = of_sine;
  h.tokens = tokens, h.table_batch = tables == 1 ? 0 : tokens * h.rotary, h.type = *element_of(dtype);
  return h;
}

Tensor decoder_op(const Tensor& x, const Tensor& cosine, const Tensor& sine, const Optional& start,
                  const Optional& stop, Tensors tensors, Tensors caches, Numbers numbers, std::vector<double> reals) {
  check_x(x);
  check_dim("x", x, 3);
  const ScalarType dtype = x.scalar_type();
  AO_CHECK(!caches.empty() && caches.size() % 3 == 0, "caches: are ", caches.size(), "; must be 3 for each block");
  const int64_t count = static_cast<int64_t>(caches.size()) / 3;
  const Tensor rows = readable("x", x), cosines = readable("cosine", cosine), sines = readable("sine", sine);
  Decoder call{};
  call.x = rows.const_data_ptr();
  call.batch = x.size(0), call.tokens = x.size(1), call.width = x.size(2);
  call.rotary = read_rotary(x, cosine, sine, cosines.const_data_ptr(), sines.const_data_ptr());
  Memory memory;
  Flat from{tensors, caches, numbers, reals};
  std::vector<DecoderBlock> blocks;
  blocks.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    try {
      blocks.push_back(read_block(from, call, dtype, start, stop, memory));
    } catch (const std::runtime_error& error) {
      fail("block ", i, ": ", error.what());
    }
  }
  from.check_ends();
  Tensor y = make({count, call.batch, call.tokens, call.width}, dtype);
  call.y = y.mutable_data_ptr();
  run_decoder(call, blocks.data(), count);
  return y;
}

}  // namespace
}  // namespace ao

// The arguments of blocks lie one after the other; ao_kernels/cpu/decoder.py makes them.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "decoder(Tensor x, Tensor cosine, Tensor sine, Tensor? start, Tensor? stop, Tensor[] tensors, "
      "Tensor(a!)[] caches, int[] numbers, float[] reals) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) { m.impl("decoder", TORCH_BOX(&ao::decoder_op)); }
