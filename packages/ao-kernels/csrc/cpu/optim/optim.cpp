#include "optim.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "../isa.h"
#include "../parallel.h"
#include "rules.h"

namespace ao {
namespace {

// Blocks that are worth a thread.
constexpr int64_t kGrain = 64;
constexpr int kExponents = 32;
constexpr uint32_t kInfinity = 0x7f800000;

// The number of a key.
float number_of(int32_t key) { return std::bit_cast<float>(key ^ (key >> 31 & 0x7fffffff)); }

using Cuts = std::vector<uint32_t>;

// Where on one side of 0 a step lies between the magnitudes cut - 1 and cut, as bits; increasing.
Cuts cuts_of(const int32_t* steps, bool negative) {
  Cuts cuts;
  for (int i = 0; i < 255; ++i) {
    const uint32_t bits = static_cast<uint32_t>(steps[i]), cut = negative ? 0 - bits : bits;
    if (negative == (steps[i] < 0) && cut <= kInfinity) cuts.push_back(cut);
  }
  if (negative) std::reverse(cuts.begin(), cuts.end());
  return cuts;
}

// Whether cells of so many bits of an exponent's mantissa hold one cut each at most; the first one of
// the least exponent begins at 0.
bool are_fine(const Cuts& cuts, uint32_t exponent, bool is_least, int bits) {
  const uint32_t begin = is_least ? 0 : exponent << 23, end = (exponent + 1) << 23;
  const int shift = 23 - bits;
  int64_t last = -1;
  for (auto cut = std::upper_bound(cuts.begin(), cuts.end(), begin); cut != cuts.end() && *cut < end; ++cut) {
    const uint32_t cell = std::max(*cut >> shift, exponent << bits);
    const bool inside = *cut % (1u << shift) != 0 || *cut < exponent << 23;
    if (inside && cell == last) return false;
    if (inside) last = cell;
  }
  return true;
}

// Whether the codes between the steps are those that `code` computes, for numbers up to `reach`.
template <class Code>
bool follows(const StateFormat& f, const int32_t* steps, float reach, Code code) {
  // a root is rounded: the numbers are not those next to a step
  constexpr float kLess = 1 - 1e-5f, kMore = 1 + 1e-5f;
  if (f.reach > reach) return false;
  for (const float end : {-f.reach, f.reach}) {
    int i = 0;
    while (i < 255 && number_of(steps[i]) <= end) ++i;
    if (code(end) != f.order[i]) return false;
  }
  for (int i = 0; i < 255; ++i) {
    const float step = number_of(steps[i]);
    if (!(std::abs(step) < f.reach)) continue;
    const float lower = step == 0 ? -step : step * (step < 0 ? kMore : kLess);
    const float upper = step * (step < 0 ? kLess : kMore);
    if (code(lower) != f.order[i] || code(upper) != f.order[i + 1]) return false;
  }
  return true;
}

// The values of `square` and `fourth` are those that decoding computes too.
Coding coding_of(const StateFormat& f, const int32_t* steps) {
  bool is_square = follows(f, steps, 1, optim::square_code), is_fourth = follows(f, steps, 1, optim::fourth_code);
  for (int i = 0; i < 255; ++i) {
    const double square = (i - 127) * std::abs(i - 127) / 16129.0, root = i * i / 65025.0;
    is_square = is_square && std::abs(f.values[i] - square) <= 0x1p-24 * std::abs(square);
    is_fourth = is_fourth && std::abs(f.values[i] - root * root) <= 0x1p-24 * root * root;
  }
  if (is_square) return Coding::square;
  if (is_fourth && f.values[255] == 1) return Coding::fourth;
  if (follows(f, steps, 448, optim::e4m3_code)) return Coding::e4m3;
  return follows(f, steps, 1.875f, optim::e5m3_code) ? Coding::e5m3 : Coding::table;
}

// Fills in `first` of every tensor and makes the step.
template <class S>
void by_blocks(S& step, StepTensor* tensors, void (*kernel)(const S&, int64_t, int64_t)) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < step.size; ++i) {
    tensors[i].first = blocks;
    blocks += (tensors[i].count + kStateBlock - 1) / kStateBlock;
  }
  step.tensors = tensors;
  parallel_for(0, blocks, kGrain, [&](int64_t begin, int64_t end) { kernel(step, begin, end); });
}

}  // namespace

const char* make_state(const float* values, const int32_t* steps, const uint8_t* order, float reach,
                       StateFormat& state) {
  state.reach = reach;
  if (!std::is_sorted(steps, steps + 255)) return "must increase";
  const Cuts sides[] = {cuts_of(steps, false), cuts_of(steps, true)};
  uint32_t top = 1u << 23;
  for (const Cuts& cuts : sides) {
    if (!cuts.empty()) top = std::max(top, std::min(cuts.back(), kInfinity - 1));
  }
  const uint32_t last = top >> 23, least = last >= kExponents ? last - (kExponents - 1) : 0;
  state.least = static_cast<uint16_t>(least << 7);
  state.greatest = static_cast<uint16_t>(last << 7 | 127);
  std::vector<uint32_t> begins;  // of cells, as magnitudes
  for (uint32_t e = least; e <= last; ++e) {
    int bits = 0;
    while (bits < 8 && !(are_fine(sides[0], e, e == least, bits) && are_fine(sides[1], e, e == least, bits))) {
      ++bits;
    }
    if (bits == 8) return "lie too near to each other";
    const uint32_t place = e % kExponents, size = 1u << (23 - bits);
    state.shift[place] = static_cast<uint16_t>(7 - bits);
    state.offset[place] = static_cast<uint16_t>((e << bits) - begins.size());
    for (uint32_t i = 0; i < 1u << bits; ++i) begins.push_back((e << 23) + i * size);
  }
  begins[0] = 0;
  begins.push_back(kInfinity + 1);
  const size_t cells = begins.size() - 1;
  const bool has_negative = !sides[1].empty();
  if (cells << has_negative > 512) return "are of too many sizes";
  const auto interval = [&](int64_t key) {
    return static_cast<uint8_t>(std::upper_bound(steps, steps + 255, key) - steps);
  };
  for (size_t i = 0; i < cells; ++i) {
    state.cells[i] = interval(begins[i]);
    if (has_negative) state.cells[cells + i] = interval(-static_cast<int64_t>(begins[i + 1]));
  }
  for (size_t i = cells << has_negative; i < 512; ++i) state.cells[i] = 0;
  state.negative = static_cast<uint16_t>(has_negative ? cells : 0);
  for (int i = 0; i < 256; ++i) {
    const int32_t key = i < 255 ? steps[i] : INT32_MAX;
    // no number that is compared with it lies between 0 and 1: only -0 must not equal it
    const float step = key == 0 ? 1.0f : number_of(key);
    const uint32_t value_bits = std::bit_cast<uint32_t>(values[i]), step_bits = std::bit_cast<uint32_t>(step);
    state.values[i] = values[i];
    state.steps[i] = step;
    for (int b = 0; b < 4; ++b) {
      state.value_bytes[b][i] = static_cast<uint8_t>(value_bits >> 8 * b);
      state.step_bytes[b][i] = static_cast<uint8_t>(step_bits >> 8 * b);
    }
    state.is_short = (i == 0 || state.is_short) && value_bits % 65536 == 0;
    state.order[i] = order[i];
    state.in_order = (i == 0 || state.in_order) && order[i] == i;
  }
  const float lowest = *std::min_element(values, values + 256);
  state.of_zeros = lowest > 0 ? 0x1p-126f : 1.0f;
  state.coding = coding_of(state, steps);
  return nullptr;
}

void adam_step(Adam& adam, StepTensor* tensors) {
  const bool is_companded = adam.m.coding == Coding::square && adam.v.coding == Coding::fourth;
  adam.values = is_companded                            ? MomentFormat::companded
                : adam.m.is_short && adam.v.is_short ? MomentFormat::halves
                                                        : MomentFormat::any;
  by_blocks(adam, tensors, isa().optim.adam);
}

void lion_step(Lion& lion, StepTensor* tensors) { by_blocks(lion, tensors, isa().optim.lion); }

}  // namespace ao
