// Sums over blocks on all threads. Arguments have been checked.
#pragma once
#include "kernels.h"

namespace ao {

void scale_sums(const ScaleSums& call);
void search_scales(const SearchScales& call);
void learned_gradients(const LearnedGradients& call);

}  // namespace ao
