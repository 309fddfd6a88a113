// Which instruction set is used.
#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
// Registers that the system must be asked for. AO_UNIT_NAME: the compiler knew the instruction set.
#if defined(AO_UNIT_amx) && defined(__linux__)
#define AO_HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ao {

extern const Isa isa_generic;
#if defined(__x86_64__)
extern const Isa isa_avx2;
extern const Isa isa_avx512_vnni;
extern const Isa isa_avx512;
extern const LinearKernels isa_avx2_vnni;
extern const LinearKernels isa_amx;
#elif defined(__aarch64__)
extern const Isa isa_neon;
#endif

namespace {

// A set, and whether this processor and its operating system have it.
struct Candidate {
  const Isa* isa;
  bool usable;
};

#if defined(__x86_64__)
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#if AO_UNIT_avx2_vnni
// The kernels of AVX2 with matmuls by dot products of bytes and words.
const Isa& with_dot_products() {
  static const Isa made = [] {
    Isa isa = isa_avx2;
    isa.name = "avx2_vnni", isa.linear = isa_avx2_vnni;
    return isa;
  }();
  return made;
}

bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

#if AO_HAS_AMX
// The kernels of AVX-512 with matmuls in tile registers.
const Isa& with_tiles() {
  static const Isa made = [] {
    Isa isa = isa_avx512;
    isa.name = "amx", isa.linear.tiles = &isa_amx;
    return isa;
  }();
  return made;
}

// Has the processor tile registers, does the system keep them, and may this process use them? A process asks once,
// for all its threads and those that it forks; a system that knows of no such question refuses it.
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // products of bfloat16, tiles, products of bytes
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileStates = 1u << 17 | 1u << 18;
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (low & kTileStates) == kTileStates && syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}
#endif

// Those compiled in, the best one first.
std::vector<Candidate> candidates() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512_vnni = avx2 && __builtin_cpu_supports("avx512f") &&
                           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  const bool avx512 =
      avx512_vnni && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
  std::vector<Candidate> found;
#if AO_HAS_AMX
  found.push_back({&with_tiles(), avx512 && has_amx()});
#endif
  found.insert(found.end(), {{&isa_avx512, avx512}, {&isa_avx512_vnni, avx512_vnni}});
#if AO_UNIT_avx2_vnni
  found.push_back({&with_dot_products(), avx2 && has_avx_vnni()});
#endif
  found.insert(found.end(), {{&isa_avx2, avx2}, {&isa_generic, true}});
  return found;
#elif defined(__aarch64__)
  return {{&isa_neon, true}, {&isa_generic, true}};
#else
  return {{&isa_generic, true}};
#endif
}

struct Choice {
  const Isa* isa = nullptr;
  std::string usable, error;
};

Choice choose() {
  Choice choice;
  const char* wanted = std::getenv("AO_CPU_ISA");
  const bool named = wanted != nullptr && *wanted != '\0';
  const Isa* same = nullptr;
  bool known = false;
  for (const Candidate& candidate : candidates()) {
    const bool asked_for = named && std::strcmp(candidate.isa->name, wanted) == 0;
    known = known || asked_for;
    if (!candidate.usable) continue;
    if (asked_for) same = candidate.isa;
    if (choice.isa == nullptr) choice.isa = candidate.isa;
    choice.usable += (choice.usable.empty() ? "" : ", ") + std::string(candidate.isa->name);
  }
  if (same != nullptr) {
    choice.isa = same;
  } else if (named) {
    choice.error = "AO_CPU_ISA=" + std::string(wanted) +
                   (known ? ": this processor lacks it" : ": no such instruction set") +
                   "; usable here: " + choice.usable;
  }
  return choice;
}

const Choice& choice() {
  static const Choice made = choose();
  return made;
}

}  // namespace

const Isa& isa() { return *choice().isa; }

const char* usable_isas() { return choice().usable.c_str(); }

bool prefers_words() {
#if defined(__x86_64__)
  static const bool intel = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
  }();
  return intel;
#else
  return false;
#endif
}

const char* isa_error() {
  const std::string& error = choice().error;
  return error.empty() ? nullptr : error.c_str();
}

}  // namespace ao
