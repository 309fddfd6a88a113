// Steps of any rule that works element by element, told as a program.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <bit>

#include "state.h"

namespace ao {
namespace {

using Integers = std::vector<int64_t>;
using Reals = std::vector<double>;

// What `kinds` says of a moment.
enum class Stored : int64_t { dense, flat, rank1 };
constexpr size_t kStepSize = 5;  // numbers of an instruction in `program`: operation, result, three operands

NibbleFormat read_nibbles(const std::string& name, const Tensor& table, const Tensor& steps, const Tensor& order,
                          int64_t nan_code, double reach) {
  check_dtype(name.c_str(), table, {ScalarType::Float});
  check_dtype(name.c_str(), steps, {ScalarType::Int});
  check_dtype(name.c_str(), order, {ScalarType::Byte});
  check_numel(name.c_str(), steps, 15, "one less than there are codes");
  check_numel(name.c_str(), order, 16, "one per code of 4 bits");
  check_range("nans", nan_code, 0, 15);
  AO_CHECK(reach >= 0x1p-100 && reach <= 0x1p100, "reaches: ", reach, " must be positive, from 2**-100 to 2**100");
  const Tensor values = readable(name.c_str(), table), keys = readable(name.c_str(), steps);
  const Tensor codes = readable(name.c_str(), order);
  NibbleFormat f{};
  std::copy_n(static_cast<const float*>(values.const_data_ptr()), 16, f.values);
  std::copy_n(static_cast<const int32_t*>(keys.const_data_ptr()), 15, f.steps);
  std::copy_n(static_cast<const uint8_t*>(codes.const_data_ptr()), 16, f.order);
  AO_CHECK(std::is_sorted(f.steps, f.steps + 15), name, ": steps must increase");
  f.in_order = true;
  for (int i = 0; i < 16; ++i) {
    check_range("formats: a code", f.order[i], 0, 15);
    f.in_order = f.in_order && f.order[i] == i;
  }
  f.nan_code = static_cast<uint8_t>(nan_code), f.reach = static_cast<float>(reach);
  f.of_zeros = *std::min_element(f.values, f.values + 16) > 0 ? 0x1p-126f : 1.0f;
  return f;
}

// The formats of quantized moments; `kinds` has been checked.
void read_formats(const Integers& kinds, const Tensors& formats, const Integers& nans, const Reals& reaches,
                  ProgramStep& s) {
  const size_t quantized = kinds.size() - static_cast<size_t>(std::count(kinds.begin(), kinds.end(), 0));
  AO_CHECK(formats.size() == 3 * quantized, "formats: has ", formats.size(), " tensors; must have ", 3 * quantized,
           ": table, steps and order of each quantized moment");
  AO_CHECK(nans.size() == quantized, "nans: has ", nans.size(), " codes; must have ", quantized);
  AO_CHECK(reaches.size() == quantized, "reaches: has ", reaches.size(), " numbers; must have ", quantized);
  size_t next = 0;
  for (size_t k = 0; k < kinds.size(); ++k) {
    MomentKind& kind = s.kinds[k];
    kind.keep = Keep::dense;
    if (Stored{kinds[k]} == Stored::dense) continue;
    const Tensor *of = &formats[3 * next], &table = *of;
    const std::string name = "formats: those of moment " + std::to_string(k);
    check_cpu(name.c_str(), table);
    AO_CHECK(table.numel() == 16 || (table.numel() == 256 && Stored{kinds[k]} == Stored::flat), name, " have ",
             table.numel(), " values; must have 16, or 256 where kinds has 1");
    if (table.numel() == 256) {
      kind.keep = Keep::bytes;
      read_state(name, of[0], of[1], of[2], nans[next], reaches[next], kind.bytes);
    } else {
      kind.keep = Stored{kinds[k]} == Stored::flat ? Keep::nibbles : Keep::rank1;
      kind.nibbles = read_nibbles(name, of[0], of[1], of[2], nans[next], reaches[next]);
    }
    ++next;
  }
}

Program read_program(const Integers& program, const Reals& numbers, const Integers& outputs, size_t moments,
                     int& norms) {
  AO_CHECK(program.size() % kStepSize == 0, "program: has ", program.size(), " numbers; must have 5 per instruction");
  const size_t size = program.size() / kStepSize;
  AO_CHECK(size <= kProgramSteps, "program: has ", size, " instructions; must have at most ", kProgramSteps);
  AO_CHECK(numbers.size() == size, "numbers: has ", numbers.size(), "; must have ", size, ", one per instruction");
  AO_CHECK(outputs.size() == 1 + moments, "outputs: has ", outputs.size(), " registers; must have ", 1 + moments,
           ": of the parameter and each moment");
  Program found{};
  found.size = static_cast<int>(size);
  for (size_t i = 0; i < size; ++i) {
    const int64_t* step = &program[kStepSize * i];
    Instruction& of = found.code[i];
    check_range("program: an operation", step[0], 0, kOperations - 1);
    of.operation = static_cast<Operation>(step[0]);
    for (size_t j = 1; j < kStepSize; ++j) {
      check_range("program: a register", step[j], 0, kProgramRegisters - 1);
      (j == 1 ? of.result : of.operands[j - 2]) = static_cast<uint8_t>(step[j]);
    }
    of.number = static_cast<float>(numbers[i]);
    if (of.operation == Operation::norm) {
      AO_CHECK(norms < kProgramNorms, "program: has more than ", kProgramNorms, " norms");
      of.norm = static_cast<uint8_t>(norms++);
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_range("outputs: a register", outputs[i], 0, kProgramRegisters - 1);
    AO_CHECK(std::count(outputs.begin(), outputs.end(), outputs[i]) == 1, "outputs: register ", outputs[i],
             " is named twice; each output needs one of its own");
  }
  return found;
}

// Norms are of what is known before any of them.
void check_norms(const Program& measure) {
  uint32_t depending = 0;  // registers
  for (int i = 0; i < measure.size; ++i) {
    const Instruction& of = measure.code[i];
    bool depends = false;
    for (int j = 0; j < kOperands[static_cast<int>(of.operation)]; ++j) {
      depends = depends || (depending >> of.operands[j] & 1) != 0;
    }
    const bool is_norm = of.operation == Operation::norm;
    AO_CHECK(!(is_norm && depends), "program: has a norm of what depends on another one");
    depending &= ~(uint32_t{1} << of.result);
    if (is_norm || depends) depending |= uint32_t{1} << of.result;
  }
}

// The parts of all moments in `states`, in the order of moments, their parts, and tensors.
class Parts {
 public:
  Parts(const Tensors& states, const Tensors& params) : states_(states), params_(params) {}

  // The next part: of each tensor an element per `block` of its parameter's.
  Tensors next(ScalarType dtype, int64_t block) {
    const Tensors found = take();
    check_list("states", found, params_, dtype, block);
    return found;
  }

  // The next part, of any number of elements.
  Tensors next(ScalarType dtype) {
    const Tensors found = take();
    for (const Tensor& tensor : found) {
      check_cpu("states", tensor);
      check_dtype("states", tensor, {dtype});
      check_contiguous("states", tensor);
      check_aligned("states", tensor);
    }
    return found;
  }

  // The dtype of the next part.
  ScalarType dtype() const {
    AO_CHECK(place_ < states_.size(), "states: has ", states_.size(), " tensors, too few for `kinds`");
    check_defined("states", states_[place_]);
    return states_[place_].scalar_type();
  }

  void end() const {
    AO_CHECK(place_ == states_.size(), "states: has ", states_.size(), " tensors; must have ", place_);
  }

 private:
  Tensors take() {
    AO_CHECK(states_.size() - place_ >= params_.size(), "states: has ", states_.size(),
             " tensors, too few for `kinds`");
    const auto first = states_.begin() + static_cast<int64_t>(place_);
    place_ += params_.size();
    return {first, first + static_cast<int64_t>(params_.size())};
  }

  const Tensors &states_, &params_;
  size_t place_ = 0;
};

void read_moment(Parts& parts, size_t k, ProgramStep& s, std::vector<ProgramTensor>& tensors) {
  MomentKind& kind = s.kinds[k];
  const auto each = [&](const Tensors& part, auto set) {
    for (size_t i = 0; i < tensors.size(); ++i) set(tensors[i].moments[k], part[i].mutable_data_ptr());
  };
  const auto set_codes = [](ProgramMoment& m, void* data) { m.codes = data; };
  const auto set_scales = [](ProgramMoment& m, void* data) { m.scales = static_cast<float*>(data); };
  const auto set_columns = [](ProgramMoment& m, void* data) { m.columns = static_cast<float*>(data); };
  if (kind.keep == Keep::dense) {
    const ScalarType dtype = parts.dtype();
    kind.type = element_of("states", dtype);
    return each(parts.next(dtype, 1), set_codes);
  }
  if (kind.keep != Keep::rank1) {
    each(parts.next(ScalarType::Byte, kind.keep == Keep::bytes ? 1 : 2), set_codes);
    return each(parts.next(ScalarType::Float, kind.keep == Keep::bytes ? kStateBlock : kNibbleBlock), set_scales);
  }
  const Tensors codes = parts.next(ScalarType::Byte);
  const Tensors rows = parts.next(ScalarType::Float), columns = parts.next(ScalarType::Float);
  each(codes, set_codes);
  each(rows, set_scales);
  each(columns, set_columns);
  for (size_t i = 0; i < tensors.size(); ++i) {
    ProgramTensor& t = tensors[i];
    const int64_t height = rows[i].numel(), width = columns[i].numel();
    AO_CHECK(width > 0, "states: there are no scales of columns");
    AO_CHECK(t.count % width == 0 && height == t.count / width, "states: there are ", height, " scales of rows and ",
             width, " of columns, for ", t.count, " elements");
    check_numel("states", codes[i], height * ((width + 1) / 2), "half a byte per element, in whole bytes per row");
    AO_CHECK(t.columns == 0 || t.columns == width, "states: moments see matrices of ", t.columns, " and ", width,
             " columns; must be as many");
    t.columns = width;
  }
}

void rule_step_op(const Tensors& params, const Tensors& grads, const Tensors& lost, const Tensors& states,
                  Integers kinds, const Tensors& formats, Integers nans, Reals reaches, Integers program,
                  Reals numbers, Integers outputs, std::optional<int64_t> seed) {
  ProgramStep s{};
  AO_CHECK(kinds.size() <= kProgramMoments, "kinds: has ", kinds.size(), " moments; must have at most ",
           kProgramMoments);
  for (const int64_t kind : kinds) check_range("kinds: one", kind, 0, 2);
  s.moments = static_cast<int>(kinds.size());
  read_formats(kinds, formats, nans, reaches, s);
  const Program all = read_program(program, numbers, outputs, kinds.size(), s.norms);
  uint32_t of_all = 0, of_surveyed = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    s.outputs[i] = static_cast<uint8_t>(outputs[i]);
    of_all |= uint32_t{1} << outputs[i];
    if (i > 0 && s.kinds[i - 1].keep == Keep::rank1) of_surveyed |= uint32_t{1} << outputs[i];
  }
  s.update = needed(all, of_all), s.survey = needed(all, of_surveyed), s.measure = needed(all, 0, true);
  const uint32_t inputs = s.update.inputs | s.measure.inputs;
  AO_CHECK(inputs >> (2 + kinds.size()) == 0, "program: reads register ", std::bit_width(inputs) - 1,
           ", which nothing was written to");
  check_norms(s.measure);
  if (params.empty()) {
    AO_CHECK(grads.empty() && lost.empty() && states.empty(), "grads, lost, states: must be empty, as `params`");
    return;
  }
  check_defined("params", params[0]);
  const ScalarType dtype = params[0].scalar_type();
  s.p_type = element_of("params", dtype);
  check_list("params", params, params, dtype, 1);
  AO_CHECK(!grads.empty(), "grads: has 0 tensors; must have ", params.size(), ", as `params`");
  check_defined("grads", grads[0]);
  s.g_type = element_of("grads", grads[0].scalar_type());
  check_list("grads", grads, params, grads[0].scalar_type(), 1);
  if (!lost.empty()) check_list("lost", lost, params, dtype, 1);
  std::vector<ProgramTensor> tensors(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    tensors[i].p = params[i].mutable_data_ptr(), tensors[i].g = grads[i].const_data_ptr();
    tensors[i].lost = lost.empty() ? nullptr : lost[i].mutable_data_ptr();
    tensors[i].count = params[i].numel();
  }
  Parts parts(states, params);
  for (size_t k = 0; k < kinds.size(); ++k) read_moment(parts, k, s, tensors);
  parts.end();
  s.stochastic = seed.has_value();
  s.seed = static_cast<uint64_t>(seed.value_or(0));
  program_step(s, tensors);
}

}  // namespace
}  // namespace ao

// One step for all tensors, in place. kinds: of each moment 0, numbers; 1, codes with a scale per block (of 256
// elements for 8 bits, of 128 for 4); 2, codes of 4 bits with scales of rows and of columns. states: codes (or
// numbers) of all tensors, then their scales, for one moment after the other. formats, nans, reaches: of each
// quantized moment.
// program, numbers: five integers and a number per instruction, as csrc/cpu/optim/program.h has them. outputs: the
// registers that hold the parameter and the moments in the end. seed: of the rounding of bfloat16.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "rule_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] lost, Tensor(c!)[] states, int[] kinds, "
      "Tensor[] formats, int[] nans, float[] reaches, int[] program, float[] numbers, int[] outputs, int? seed) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) { m.impl("rule_step", TORCH_BOX(&ao::rule_step_op)); }
