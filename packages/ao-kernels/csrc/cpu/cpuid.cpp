// Which instruction set is used.
#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ao {

extern const Isa isa_generic;
#if defined(__x86_64__)
extern const Isa isa_avx2;
extern const Isa isa_avx512;
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

// Those compiled in, the best one first.
std::vector<Candidate> candidates() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
  return {{&isa_avx512, avx512}, {&isa_avx2, avx2}, {&isa_generic, true}};
#elif defined(__aarch64__)
  return {{&isa_neon, true}, {&isa_generic, true}};
#else
  return {{&isa_generic, true}};
#endif
}

struct Choice {
  const Isa* isa = nullptr;
  std::string error;
};

Choice choose() {
  Choice choice;
  const char* wanted = std::getenv("AO_CPU_ISA");
  const bool named = wanted != nullptr && *wanted != '\0';
  std::string usable;
  bool known = false;
  for (const Candidate& candidate : candidates()) {
    const bool same = named && std::strcmp(candidate.isa->name, wanted) == 0;
    known = known || same;
    if (!candidate.usable) continue;
    if (same) return {candidate.isa, ""};
    if (choice.isa == nullptr) choice.isa = candidate.isa;
    usable += (usable.empty() ? "" : ", ") + std::string(candidate.isa->name);
  }
  if (named) {
    choice.error = "AO_CPU_ISA=" + std::string(wanted) +
                   (known ? ": this processor lacks it" : ": no such instruction set") +
                   "; usable here: " + usable;
  }
  return choice;
}

const Choice& choice() {
  static const Choice made = choose();
  return made;
}

}  // namespace

const Isa& isa() { return *choice().isa; }

const char* isa_error() {
  const std::string& error = choice().error;
  return error.empty() ? nullptr : error.c_str();
}

}  // namespace ao
