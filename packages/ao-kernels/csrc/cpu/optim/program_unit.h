// A step of a rule that is told as a program, block by block; included by the unit of an instruction set.
#pragma once
#include "keep.h"

namespace ao::AO_ISA::programs {

static inline int count_at(const ProgramTensor& t, int64_t from) {
  return t.count - from < kBlock ? static_cast<int>(t.count - from) : kBlock;
}

// What a program reads.
static inline void load_inputs(const ProgramStep& s, const Program& program, const ProgramTensor& t, int64_t from,
                               int count, Numbers* registers) {
  const auto is_read = [&](int input) { return (program.inputs >> input & 1) != 0; };
  const int64_t place = from * bytes_of(s.p_type);
  if (is_read(0)) {
    float* p = registers[0].values;
    load_numbers(s.p_type, static_cast<const uint8_t*>(t.p) + place, count, p);
    if (t.lost != nullptr) {
      float lost[kBlock];
      load_numbers(s.p_type, static_cast<const uint8_t*>(t.lost) + place, count, lost);
      fill(p, [&](int i) { return add(load(p + i), load(lost + i)); });
    }
  }
  if (is_read(1)) {
    load_numbers(s.g_type, static_cast<const uint8_t*>(t.g) + from * bytes_of(s.g_type), count, registers[1].values);
  }
  for (int k = 0; k < s.moments; ++k) {
    if (is_read(2 + k)) load_moment(s.kinds[k], t, t.moments[k], from, count, registers[2 + k].values);
  }
}

static inline void store_outputs(const ProgramStep& s, int64_t number, int64_t from, int count, Numbers* registers) {
  const ProgramTensor& t = s.tensors[number];
  uint32_t bits[kBlock];
  // each of a tensor's numbers of its own: the parameter's is that which other steps draw
  const auto noise = [&](int output, Element type) -> const uint32_t* {
    if (!s.stochastic || type != Element::bf16) return nullptr;
    const uint64_t tensor = static_cast<uint64_t>(number) + (static_cast<uint64_t>(output) << 32);
    optim::random_bits(s.seed, tensor, static_cast<uint64_t>(from), bits);
    return bits;
  };
  const int size = bytes_of(s.p_type);
  const float* values = registers[s.outputs[0]].values;
  uint8_t* to = static_cast<uint8_t*>(t.p) + from * size;
  store_numbers(s.p_type, to, values, count, noise(0, s.p_type));
  for (int i = 0; t.lost != nullptr && i < count; i += 16) {
    const F rest = sub(load(values + i), load_as(s.p_type, to + i * size, count - i));
    store_as(s.p_type, static_cast<uint8_t*>(t.lost) + (from + i) * size, rest, count - i);
  }
  for (int k = 0; k < s.moments; ++k) {
    const MomentKind& kind = s.kinds[k];
    const uint32_t* own = kind.keep == Keep::dense ? noise(1 + k, kind.type) : nullptr;
    store_moment(kind, t, t.moments[k], from, count, registers[s.outputs[1 + k]], own);
  }
}

// f(number of the tensor, its first element, how many) of each block.
template <class Block>
static inline void by_blocks(const ProgramStep& s, int64_t begin, int64_t end, Block each) {
  int64_t low = 0, high = s.size;  // the last tensor that does not begin beyond the first block
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (s.tensors[middle].first <= begin ? low : high) = middle;
  }
  for (; begin < end; ++begin) {
    while (begin >= s.tensors[low].first + (s.tensors[low].count + kBlock - 1) / kBlock) ++low;
    const int64_t from = (begin - s.tensors[low].first) * kBlock;
    each(low, from, count_at(s.tensors[low], from));
  }
}

static void step_blocks(const ProgramStep& s, int64_t begin, int64_t end) {
  Numbers registers[kProgramRegisters];
  by_blocks(s, begin, end, [&](int64_t number, int64_t from, int count) {
    const ProgramTensor& t = s.tensors[number];
    load_inputs(s, s.update, t, from, count, registers);
    interpret(s.update, registers, count, t.norms);
    store_outputs(s, number, from, count, registers);
  });
}

static void measure_blocks(const ProgramStep& s, int64_t begin, int64_t end, float* sums) {
  Numbers registers[kProgramRegisters];
  sums += begin * s.norms;
  by_blocks(s, begin, end, [&](int64_t number, int64_t from, int count) {
    load_inputs(s, s.measure, s.tensors[number], from, count, registers);
    interpret(s.measure, registers, count, nullptr, sums);
    sums += s.norms;
  });
}

static void survey_blocks(const ProgramStep& s, int64_t number, int moment, int64_t begin, int64_t end,
                          uint32_t* rows, uint32_t* columns) {
  const ProgramTensor& t = s.tensors[number];
  const int64_t first_row = begin * kBlock / t.columns;
  Numbers registers[kProgramRegisters];
  const float* values = registers[s.outputs[1 + moment]].values;
  for (; begin < end; ++begin) {
    const int64_t from = begin * kBlock;
    const int count = count_at(t, from);
    load_inputs(s, s.survey, t, from, count, registers);
    interpret(s.survey, registers, count, t.norms);
    by_rows(t.columns, from, count, [&](int64_t row, int64_t column, int i, int n) {
      uint32_t greatest = rows[row - first_row], *others = columns + column;
      for (int j = 0; j < n; ++j) {
        const uint32_t size = bits_of(values[i + j]) & 0x7fffffff;
        others[j] = size > others[j] ? size : others[j];
        greatest = size > greatest ? size : greatest;
      }
      rows[row - first_row] = greatest;
    });
  }
}

constexpr ProgramKernels kProgramKernels = {.step = step_blocks, .measure = measure_blocks, .survey = survey_blocks};

}  // namespace ao::AO_ISA::programs
