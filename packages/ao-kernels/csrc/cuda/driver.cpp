#include "driver.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#ifdef __linux__
#include <dlfcn.h>
#endif

namespace ao::gpu {
namespace {

// Of cuda.h, as far as it is used; tests compare with the header.
using Result = int;
using Handle = void*;  // CUlibrary, CUkernel, CUstream
struct Attribute {
  int id;
  int pad;
  union {
    char size[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int number;
  } value;
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
  Handle stream;
  Attribute* attributes;
  unsigned count;
};
constexpr int kClusterDimension = 4, kProgrammaticSerialization = 6;
constexpr int kMaxDynamicShared = 8, kSharedCarveout = 9;
constexpr int kProcessors = 16, kMajor = 75, kSharedOfProcessor = 81, kSharedOfCta = 97;

struct Driver {
  Result (*error_text)(Result, const char**);
  Result (*version)(int*);
  Result (*device)(int*, int);
  Result (*attribute)(int*, int, int);
  Result (*load)(Handle*, const void*, Handle*, Handle*, unsigned, Handle*, Handle*, unsigned);
  Result (*kernel)(Handle*, Handle, const char*);
  Result (*set)(int, int, Handle, int);
  Result (*launch)(const LaunchConfig*, Handle, void**, void**);
  std::string problem;
};

Driver find_driver() {
  Driver driver{};
#ifdef __linux__
  if (image_count == 0) {
    driver.problem = "this build of ao-kernels has no CUDA kernels";
    return driver;
  }
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    driver.problem = "NVIDIA's driver, libcuda.so.1, is not installed";
    return driver;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (!function && driver.problem.empty()) {
      driver.problem = std::string("the driver has no ") + name + ": it must be one for CUDA 13 (580) or later";
    }
  };
  find(driver.error_text, "cuGetErrorString");
  find(driver.version, "cuDriverGetVersion");
  find(driver.device, "cuDeviceGet");
  find(driver.attribute, "cuDeviceGetAttribute");
  find(driver.load, "cuLibraryLoadData");
  find(driver.kernel, "cuLibraryGetKernel");
  find(driver.set, "cuKernelSetAttribute");
  find(driver.launch, "cuLaunchKernelEx");
  int version = 0;
  if (driver.problem.empty() && (driver.version(&version) != 0 || version < 13000)) {
    driver.problem = "the driver is one for CUDA " + std::to_string(version / 1000) + "." +
                     std::to_string(version % 1000 / 10) + "; the CUDA kernels need 13.0 (580) or later";
  }
#else
  driver.problem = "there are CUDA kernels on Linux only";
#endif
  return driver;
}

const Driver& driver() {
  static const Driver found = find_driver();
  return found;
}

void check(Result result, const char* what) {
  if (result == 0) return;
  const char* text = nullptr;
  driver().error_text(result, &text);
  throw std::runtime_error(std::string(what) + ": " + (text ? text : "unknown error"));
}

int attribute(int device, int which) {
  int value = 0;
  check(driver().attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

std::mutex guard;

// A kernel, ready for the device. Kernels are loaded once, and stay.
Handle kernel(Storage storage, bool bfloat16, int block_m, int device, int shared) {
  static std::map<int, Handle> libraries;
  static std::map<std::tuple<int, bool, int, int>, Handle> kernels;
  const std::lock_guard lock(guard);
  Handle& found = kernels[{static_cast<int>(storage), bfloat16, block_m, device}];
  if (found) return found;
  Handle& library = libraries[static_cast<int>(storage)];
  if (!library) {
    const void* data = images[static_cast<int>(storage)].data;
    check(driver().load(&library, data, nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
  }
  const std::string name = std::string("ao_linear_") + (bfloat16 ? "bf16_" : "f16_") + std::to_string(block_m);
  Handle made = nullptr;
  check(driver().kernel(&made, library, name.c_str()), "cuLibraryGetKernel");
  int number = 0;
  check(driver().device(&number, device), "cuDeviceGet");
  check(driver().set(kMaxDynamicShared, shared, made, number), "cuKernelSetAttribute");
  check(driver().set(kSharedCarveout, 100, made, number), "cuKernelSetAttribute");
  return found = made;
}

}  // namespace

std::string unavailable() { return driver().problem; }

Device device_of(int index) {
  static std::map<int, Device> devices;
  const std::lock_guard lock(guard);
  const auto there = devices.find(index);
  if (there != devices.end()) return there->second;
  int number = 0;
  check(driver().device(&number, index), "cuDeviceGet");
  const Device found{attribute(number, kProcessors), attribute(number, kSharedOfCta),
                     attribute(number, kSharedOfProcessor), attribute(number, kMajor) >= 9};
  return devices[index] = found;
}

void launch(Storage storage, bool bfloat16, const Plan& plan, const Linear& call, int device, void* stream) {
  const Device there = device_of(device);
  const Handle found = kernel(storage, bfloat16, plan.block_m, device, there.shared_of_cta);
  Attribute attributes[2] = {};
  attributes[0].id = kProgrammaticSerialization, attributes[0].value.number = 1;
  attributes[1].id = kClusterDimension;
  attributes[1].value.cluster = {1, static_cast<unsigned>(plan.splits), 1};
  LaunchConfig config{};
  config.grid_x = static_cast<unsigned>(plan.ctas), config.grid_y = static_cast<unsigned>(plan.splits), config.grid_z = 1;
  config.block_x = kThreads, config.block_y = config.block_z = 1;
  config.shared = static_cast<unsigned>(plan.shared), config.stream = stream;
  config.attributes = attributes, config.count = !there.hopper ? 0 : plan.splits > 1 ? 2 : 1;
  void* arguments[] = {const_cast<Linear*>(&call)};
  check(driver().launch(&config, found, arguments, nullptr), "cuLaunchKernelEx");
}

}  // namespace ao::gpu
