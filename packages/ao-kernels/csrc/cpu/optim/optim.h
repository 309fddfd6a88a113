// Steps of optimizers with all threads. Arguments have been checked.
#pragma once
#include <vector>

#include "program.h"

namespace ao {

// Fills in a format, but not `nan_code`: from the value of each of 256 codes, the codes in the
// order of their values, and the steps, where x has the i-th of these codes or a later one, as keys.
// nullptr, or a sentence that says why the format cannot be a state.
const char* make_state(const float* values, const int32_t* steps, const uint8_t* order, float reach,
                       StateFormat& state);

// Fill in `first` of every tensor and make the step.
void adam_step(Adam& adam, StepTensor* tensors);
void lion_step(Lion& lion, StepTensor* tensors);

// The instructions that these registers, a bit each, depend on, where norms are known; with_norms: and all norms,
// with what they depend on.
Program needed(const Program& program, uint32_t outputs, bool with_norms = false);

// Fills in `tensors`, `first` and new scales, and makes the step.
void program_step(ProgramStep& step, std::vector<ProgramTensor>& tensors);

}  // namespace ao
