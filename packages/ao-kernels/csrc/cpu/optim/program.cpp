#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>

#include "../isa.h"
#include "../parallel.h"
#include "optim.h"

namespace ao {
namespace {

// Blocks that are worth a thread.
constexpr int64_t kGrain = 32;

int64_t blocks_of(const ProgramTensor& t) { return (t.count + kStateBlock - 1) / kStateBlock; }

// The greatest magnitudes of a new moment in the rows and then the columns of each tensor, as bits.
using Greatest = std::vector<std::vector<uint32_t>>;

Greatest survey(const ProgramStep& s, const std::vector<ProgramTensor>& tensors, int moment, int64_t blocks) {
  Greatest found;
  int64_t widest = 0;
  for (const ProgramTensor& t : tensors) {
    found.emplace_back(t.count == 0 ? 0 : static_cast<size_t>(t.count / t.columns + t.columns));
    widest = std::max(widest, t.columns);
  }
  std::mutex turn;
  // a thread's own maxima cost what a few rows do
  const int64_t grain = std::max(kGrain, 8 * widest / kStateBlock);
  parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const ProgramTensor& t = tensors[i];
      const int64_t first = std::max(begin - t.first, int64_t{0}), last = std::min(end - t.first, blocks_of(t));
      if (first >= last) continue;
      const int64_t row = first * kStateBlock / t.columns;
      const int64_t rows = (std::min(last * kStateBlock, t.count) - 1) / t.columns + 1 - row;
      std::vector<uint32_t> own(static_cast<size_t>(rows + t.columns));
      uint32_t* columns = own.data() + rows;
      isa().programs.survey(s, static_cast<int64_t>(i), moment, first, last, own.data(), columns);
      const std::lock_guard lock(turn);
      const auto raise = [](uint32_t* all, const uint32_t* by, int64_t count) {
        for (int64_t j = 0; j < count; ++j) all[j] = std::max(all[j], by[j]);
      };
      raise(found[i].data() + row, own.data(), rows);
      raise(found[i].data() + t.count / t.columns, columns, t.columns);
    }
  });
  return found;
}

// Scales from the greatest magnitudes: all are NaN where one is, as each row meets each column.
std::vector<float> scales_of(const std::vector<uint32_t>& greatest, float reach) {
  std::vector<float> scales;
  const bool has_nan = std::any_of(greatest.begin(), greatest.end(), [](uint32_t bits) { return bits > 0x7f800000; });
  for (const uint32_t bits : greatest) {
    const float scale = std::bit_cast<float>(bits) / reach;
    scales.push_back(has_nan ? std::numeric_limits<float>::quiet_NaN()
                             : std::clamp(scale, 0x1p-126f, std::numeric_limits<float>::max()));
  }
  return scales;
}

// Fills in the norms of all tensors.
void measure(const ProgramStep& s, std::vector<ProgramTensor>& tensors, int64_t blocks) {
  std::vector<float> sums(static_cast<size_t>(blocks * s.norms));
  parallel_for(0, blocks, kGrain,
               [&](int64_t begin, int64_t end) { isa().programs.measure(s, begin, end, sums.data()); });
  for (ProgramTensor& t : tensors) {
    for (int k = 0; k < s.norms; ++k) {
      double sum = 0;  // always in the same order, with any number of threads
      for (int64_t i = t.first; i < t.first + blocks_of(t); ++i) sum += sums[static_cast<size_t>(i * s.norms + k)];
      t.norms[k] = static_cast<float>(std::sqrt(sum));
    }
  }
}

}  // namespace

Program needed(const Program& program, uint32_t outputs, bool with_norms) {
  Program found{};
  found.inputs = outputs;
  const auto bit = [](uint8_t number) { return uint32_t{1} << number; };
  for (int i = program.size; i-- > 0;) {
    const Instruction& of = program.code[i];
    const bool is_norm = of.operation == Operation::norm;
    if ((found.inputs & bit(of.result)) == 0 && !(is_norm && with_norms)) continue;
    found.inputs &= ~bit(of.result);
    const int operands = is_norm && !with_norms ? 0 : kOperands[static_cast<int>(of.operation)];
    for (int j = 0; j < operands; ++j) found.inputs |= bit(of.operands[j]);
    found.code[found.size++] = of;
  }
  std::reverse(found.code, found.code + found.size);
  return found;
}

void program_step(ProgramStep& s, std::vector<ProgramTensor>& tensors) {
  int64_t blocks = 0;
  for (ProgramTensor& t : tensors) {
    t.first = blocks;
    blocks += blocks_of(t);
  }
  s.tensors = tensors.data(), s.size = static_cast<int64_t>(tensors.size());
  if (s.norms > 0) measure(s, tensors, blocks);
  std::vector<std::vector<float>> scales;  // of rows and columns, for every moment and tensor
  for (int k = 0; k < s.moments; ++k) {
    if (s.kinds[k].keep != Keep::rank1) continue;
    for (const auto& greatest : survey(s, tensors, k, blocks)) {
      scales.push_back(scales_of(greatest, s.kinds[k].nibbles.reach));
    }
  }
  const auto each = [&](auto f) {
    auto found = scales.begin();
    for (int k = 0; k < s.moments; ++k) {
      if (s.kinds[k].keep != Keep::rank1) continue;
      for (ProgramTensor& t : tensors) {
        if (t.count > 0) f(t.moments[k], found->data(), t.count / t.columns, t.columns);
        ++found;
      }
    }
  };
  each([](ProgramMoment& m, const float* found, int64_t rows, int64_t) {
    m.new_rows = found, m.new_columns = found + rows;
  });
  parallel_for(0, blocks, kGrain, [&](int64_t begin, int64_t end) { isa().programs.step(s, begin, end); });
  each([](ProgramMoment& m, const float* found, int64_t rows, int64_t columns) {
    std::copy_n(found, rows, m.scales);
    std::copy_n(found + rows, columns, m.columns);
  });
}

}  // namespace ao
