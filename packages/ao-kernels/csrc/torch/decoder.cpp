// Decoder blocks over a cache, in one call.
#include "block/decoder.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "attend_call.h"
#include "block_call.h"

namespace ao {
namespace {

using Tensors = std::vector<Tensor>;

// The arguments of all blocks, one after the other. Memory of tensors is used for as long as there is the plan.
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
  const Tensor& tensor() {
    const Tensor& found = take("tensors", tensors, next_tensor);
    check_contiguous("tensors", found);  // else a copy would be read, which nobody writes to
    return found;
  }
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

// Blocks, caches and a head, read and checked once.
struct Plan {
  std::vector<Tensor> caches;
  Memory memory;
  std::vector<DecoderBlock> blocks;
  NormWeight norm{};
  Linear head{};
  ScalarType dtype{};
  int64_t batch = 0, width = 0;
};

// All plans there are, by number.
class Plans {
 public:
  int64_t add(std::shared_ptr<const Plan> plan) {
    const std::lock_guard lock(mutex_);
    plans_.emplace(++last_, std::move(plan));
    return last_;
  }
  std::shared_ptr<const Plan> find(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(number);
    AO_CHECK(found != plans_.end(), "plan=", number, ": there is no such plan, or it was forgotten");
    return found->second;
  }
  void forget(int64_t number) {
    std::shared_ptr<const Plan> last;  // is destroyed outside of the lock
    const std::lock_guard lock(mutex_);
    if (const auto found = plans_.find(number); found != plans_.end()) last = std::move(found->second), plans_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Plan>> plans_;
  int64_t last_ = 0;
};

Plans& plans() {
  static Plans all;
  return all;
}

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

DecoderBlock read_block(Flat& from, Plan& plan) {
  const ScalarType dtype = plan.dtype;
  Memory& memory = plan.memory;
  DecoderBlock block{};
  const Numbers heads = from.count_numbers(3);
  for (const int64_t number : heads) check_range("heads", number, 1, 1 << 20);
  const int64_t q = heads[0], kv = heads[1], dim = heads[2];
  block.norm = read_norm_of(from, plan.width, dtype, memory);
  block.qkv = read_weight("qkv_", from, plan.width, dtype, memory);
  AO_CHECK(block.qkv.n == (q + 2 * kv) * dim, "heads: are ", q, " + 2 * ", kv, " of ", dim,
           " elements; the weight has ", block.qkv.n, " rows");
  Mlp& mlp = block.mlp;
  mlp.has_output = true;
  mlp.output = read_weight("output_", from, q * dim, dtype, memory);
  AO_CHECK(mlp.output.n == plan.width, "output_numbers: are of ", mlp.output.n, " rows; must have ", plan.width);
  mlp.norm = read_norm_of(from, plan.width, dtype, memory);
  mlp.gate_up = read_weight("gate_up_", from, plan.width, dtype, memory);
  AO_CHECK(mlp.gate_up.n % 2 == 0, "gate_up_numbers: are of ", mlp.gate_up.n, " rows; must have as many for gate as for up");
  mlp.down = read_weight("down_", from, mlp.gate_up.n / 2, dtype, memory);
  AO_CHECK(mlp.down.n == plan.width, "down_numbers: are of ", mlp.down.n, " rows; must have ", plan.width);
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
  const Optional none;
  block.attend = read_attend({dtype, plan.batch, q, 1, dim},
                             {key, key_scale, key_zero, key_table, key_factors, value, value_scale, value_zero,
                              value_table, value_factors, blocks, dim, counts, tail_key, tail_value, center, none,
                              none, sinks, scale, causal != 0, window, softcap},
                             memory.kept);
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

// So many numbers are in a plan's tensor, of which the first one counts: compilers write the values of smaller tensors
// into programs, which other processes load.
constexpr int64_t kPlanNumbers = 64;

Tensor plan_decoder_op(Tensors tensors, Tensors caches, Numbers numbers, std::vector<double> reals) {
  AO_CHECK(!caches.empty() && caches.size() % 3 == 0, "caches: are ", caches.size(), "; must be 3 for each block");
  const auto plan = std::make_shared<Plan>();
  plan->caches = caches;
  for (const Tensor& cache : caches) check_cpu("caches", cache);
  check_x(caches[1]);
  check_dim("tail", caches[1], 4);
  plan->dtype = caches[1].scalar_type(), plan->batch = caches[1].size(0);
  check_range("caches: batch", plan->batch, 1, int64_t{1} << 30);
  Flat from{tensors, caches, numbers, reals};
  const int64_t columns = from.number();
  plan->width = from.number();
  check_range("width", plan->width, 1, 1 << 20);
  const size_t count = caches.size() / 3;
  for (size_t i = 0; i < count; ++i) {
    try {
      plan->blocks.push_back(read_block(from, *plan));
    } catch (const std::runtime_error& error) {
      fail("block ", i, ": ", error.what());
    }
  }
  if (columns != 0) {
    plan->norm = read_norm_of(from, plan->width, plan->dtype, plan->memory);
    plan->head = read_weight("head_", from, plan->width, plan->dtype, plan->memory);
    AO_CHECK(plan->head.n == columns, "numbers: begin with ", columns, " columns of logits; the head has ", plan->head.n);
  }
  from.check_ends();
  Tensor made = make({kPlanNumbers}, ScalarType::Long);
  auto* const of_plan = static_cast<int64_t*>(made.mutable_data_ptr());
  std::fill_n(of_plan, kPlanNumbers, 0);
  of_plan[0] = plans().add(plan);
  return made;
}

const int64_t* read_places(const char* name, const Optional& places, int64_t count) {
  if (!places) return nullptr;
  check_cpu(name, *places);
  check_dtype(name, *places, {ScalarType::Long});
  check_shape(name, *places, {count});
  check_contiguous(name, *places);
  return static_cast<const int64_t*>(places->const_data_ptr());
}

// Whether the tokens of a call fit to a block and its cache.
void check_fits(const DecoderBlock& block, const Decoder& call) {
  const Attend& a = block.attend;
  const int64_t tokens = block.counts[0], coded = block.counts[1], slots = a.tail_key.slots;
  const int64_t left = tokens - coded + call.tokens;
  AO_CHECK(coded >= 0 && coded <= tokens && coded <= a.key.tokens && left <= slots, "counts=[", tokens, ", ", coded,
           "]: of ", tokens, " tokens ", coded, " are quantized; there is memory for ", a.key.tokens, " of those, and with ",
           call.tokens, " new tokens there are ", left, " others for ", slots, " slots of the tail");
  AO_CHECK(call.rotary.rotary <= a.key.size, "cosine: has ", call.rotary.rotary, " elements for a token; heads have ",
           a.key.size);
}

std::tuple<Tensor, Tensor> decoder_op(const Tensor& x, const Tensor& cosine, const Tensor& sine, const Optional& start,
                                      const Optional& stop, const Tensor& plan, int64_t count, int64_t columns) {
  check_x(x);
  check_dim("x", x, 3);
  check_cpu("plan", plan);
  check_dtype("plan", plan, {ScalarType::Long});
  check_shape("plan", plan, {kPlanNumbers});
  const std::shared_ptr<const Plan> of = plans().find(*static_cast<const int64_t*>(plan.const_data_ptr()));
  const ScalarType dtype = of->dtype;
  const std::vector<DecoderBlock>& blocks = of->blocks;
  AO_CHECK(count == static_cast<int64_t>(blocks.size()), "blocks=", count, ": the plan has ", blocks.size());
  AO_CHECK(columns == of->head.n, "columns=", columns, ": the plan has ", of->head.n);
  check_dtype("x", x, {dtype});
  check_shape("x", x, {of->batch, x.size(1), of->width});
  const Tensor rows = readable("x", x), cosines = readable("cosine", cosine), sines = readable("sine", sine);
  Decoder call{};
  call.x = rows.const_data_ptr();
  call.batch = x.size(0), call.tokens = x.size(1), call.width = x.size(2);
  call.rotary = read_rotary(x, cosine, sine, cosines.const_data_ptr(), sines.const_data_ptr());
  call.norm = of->norm, call.head = of->head;
  call.start = read_places("start", start, of->batch), call.stop = read_places("stop", stop, of->batch);
  for (size_t i = 0; i < blocks.size(); ++i) {
    try {
      check_fits(blocks[i], call);
    } catch (const std::runtime_error& error) {
      fail("block ", i, ": ", error.what());
    }
  }
  Tensor y = make({count, call.batch, call.tokens, call.width}, dtype);
  Tensor logits = make({call.batch, call.tokens, columns}, dtype);
  call.y = y.mutable_data_ptr(), call.logits = logits.mutable_data_ptr();
  run_decoder(call, blocks.data(), count);
  return {y, logits};
}

void forget_plan_op(int64_t number) { plans().forget(number); }

}  // namespace
}  // namespace ao

// A plan: the first numbers are that of columns of logits, 0 for no head, and the elements of a token. Then the arguments
// of blocks lie one after the other, and last those of the head; ao_kernels/cpu/decoder.py makes them. A call of `decoder`
// writes to the caches of its plan. It returns what each block makes, and the logits.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def("plan_decoder(Tensor[] tensors, Tensor[] caches, int[] numbers, float[] reals) -> Tensor");
  m.def(
      "decoder(Tensor x, Tensor cosine, Tensor sine, Tensor? start, Tensor? stop, Tensor plan, int blocks, int columns) "
      "-> (Tensor, Tensor)");
  m.def("forget_plan(int number) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("plan_decoder", TORCH_BOX(&ao::plan_decoder_op));
  m.impl("decoder", TORCH_BOX(&ao::decoder_op));
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CompositeExplicitAutograd, m) { m.impl("forget_plan", TORCH_BOX(&ao::forget_plan_op)); }
