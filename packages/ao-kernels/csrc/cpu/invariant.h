// Batch-invariant mode: a row's result does not depend on how many rows are beside it.
#pragma once

namespace ao {

// Whether results of several rows are to be, bit for bit, those of each row alone.
bool batch_invariant();

// Programs that want it are counted: +1 begins, -1 ends. What they are then; never below 0.
int want_batch_invariant(int change);

}  // namespace ao
