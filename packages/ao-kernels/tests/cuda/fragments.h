// The fragments of mma.m16n8k16 with 16-bit operands, as the PTX ISA gives them ("Matrix Fragments for mma.m16n8k16 with
// floating point type"): the row and the column of element i that a lane holds.
#pragma once

namespace ao::gpu {

// groupID and threadID_in_group
constexpr int group_id(int lane) { return lane >> 2; }
constexpr int thread_in_group(int lane) { return lane % 4; }

// A, 16 × 16, elements a0 .. a7
constexpr int row_of_a(int lane, int i) { return (0 <= i && i < 2) || (4 <= i && i < 6) ? group_id(lane) : group_id(lane) + 8; }
constexpr int column_of_a(int lane, int i) { return thread_in_group(lane) * 2 + (i & 1) + (i < 4 ? 0 : 8); }
// B, 16 × 8, elements b0 .. b3
constexpr int row_of_b(int lane, int i) { return thread_in_group(lane) * 2 + (i & 1) + (i < 2 ? 0 : 8); }
constexpr int column_of_b(int lane, int) { return group_id(lane); }
// C and D, 16 × 8, elements c0 .. c3
constexpr int row_of_c(int lane, int i) { return i < 2 ? group_id(lane) : group_id(lane) + 8; }
constexpr int column_of_c(int lane, int i) { return thread_in_group(lane) * 2 + (i & 1); }

}  // namespace ao::gpu
