// Low-bit linear layers: y = act(x) @ dequantize(w).T + bias, on all threads.
#pragma once
#include "kernels.h"

namespace ao {

// Fields of `Linear` up to `act` are the caller's; the rest is made here. Sizes may be 0.
void run_linear(const Linear& call);

// Will the matmul be made in AMX tile registers? Looks at sizes, types and the table.
bool in_tile_registers(Linear call);

}  // namespace ao
