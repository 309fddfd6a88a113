// Attention over quantized keys and values on all threads.
#pragma once
#include "kernels.h"

namespace ao {

// Fields of `Attend` up to `window` are the caller's, who has checked them; the rest is made here.
void run_attend(const Attend& call);

// Fills in how `stored` meets the queries: `grid`, `flip`, `least` and `group`.
void choose_grid(Stored& stored, bool is_key);

}  // namespace ao
