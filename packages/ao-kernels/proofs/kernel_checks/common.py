"""What all checks share: names of types, and what a device has.

The budget of what streams from memory follows from the device: at 4.3 TB/s the 132 × 4 schedulers of an
H200 issue 27.6 instructions for each 128 bytes that arrive. A kernel above that waits for its own
instructions, not for memory.
"""

from __future__ import annotations

import torch

from ao_kernels.triton.weight_only.scales import KINDS

__all__ = ["BF16", "FP32", "PDL", "REGISTERS", "SHARED", "TYPES"]

BF16, FP32 = torch.bfloat16, torch.float32
#: dtypes of tensors, as signatures of kernels call them
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    **dict.fromkeys(KINDS, "*u8"),
}
#: programmatic dependent launch: to launch the next kernel, and to wait for the one before
PDL = ("PREEXIT", "ACQBULK")
#: of a thread: spilling is worse than anything, so a kernel may take what there is
REGISTERS = 255
#: most bytes of shared memory that a block can have, on sm_90
SHARED = 227 * 1024
