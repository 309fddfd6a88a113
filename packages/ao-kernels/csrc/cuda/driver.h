// The compiled kernels, and launching them by NVIDIA's driver, which is looked for when it is first needed: nothing here
// needs CUDA to compile, to link or to be loaded.
#pragma once

#include <cstddef>
#include <string>

#include "plan.h"

namespace ao::gpu {

// A file of kernels, for all devices, that was built into the library.
struct Image {
  const char* name;
  const void* data;
  size_t bytes;
};
// In a source that the build writes; without a CUDA compiler there are none.
extern const Image images[];
extern const int image_count;

// How weights are stored: the names of images, in this order.
enum class Storage { int4, int4_g32, int4_sums, int4_g32_sums, int8, f8e4m3 };

// Empty, or a sentence that says why kernels cannot be launched on this machine.
std::string unavailable();

// Throws std::runtime_error: there is no such device.
Device device_of(int index);

// Launches on a stream of a device, which is the current one. Throws std::runtime_error: what the driver says.
void launch(Storage storage, bool bfloat16, const Plan& plan, const Linear& call, int device, void* stream);

}  // namespace ao::gpu
