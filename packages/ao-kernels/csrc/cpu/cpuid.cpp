// Which instruction set is used.
#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
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
extern const ProductKernels isa_neon_dotprod, isa_neon_i8mm;
#endif

namespace {

// A set, and whether this processor and its operating system have it.
struct Candidate {
  const Isa* isa;
  bool usable;
};

#if defined(__x86_64__)
// A leaf of cpuid; zeros where the processor has none. The compilers' own __builtin_cpu_supports needs a function of
// their runtime, which not all of them bring.
struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  explicit Leaf(unsigned leaf, unsigned part = 0) {
    if (!__get_cpuid_count(leaf, part, &a, &b, &c, &d)) a = b = c = d = 0;
  }
};

bool has(unsigned word, std::initializer_list<int> bits) {
  for (const int bit : bits) {
    if (!(word >> bit & 1)) return false;
  }
  return true;
}

// Which registers the system keeps: bits of XCR0.
bool keeps(unsigned states) {
  if (!has(Leaf(1).c, {27})) return false;  // OSXSAVE: xgetbv may be used
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & states) == states;
}

bool has_avx2() {  // and FMA, AVX, F16C
  return keeps(1u << 1 | 1u << 2) && has(Leaf(1).c, {12, 28, 29}) && has(Leaf(7).b, {5});
}

bool has_avx512_vnni() {  // F, DQ, BW, VL
  const Leaf leaf(7);
  return has_avx2() && keeps(7u << 5) && has(leaf.b, {16, 17, 30, 31}) && has(leaf.c, {11});
}

bool has_avx512() {  // VBMI, BF16
  return has_avx512_vnni() && has(Leaf(7).c, {1}) && has(Leaf(7, 1).a, {5});
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

bool has_avx_vnni() { return has(Leaf(7, 1).a, {4}); }
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
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  // products of bfloat16, tiles, products of bytes
  return has(Leaf(7).d, {22, 24, 25}) && keeps(3u << 17) && syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}
#endif

#if AO_UNIT_neon_dotprod || AO_UNIT_neon_i8mm
// What the system says of an instruction: a bit of a word of the auxiliary vector on Linux, a name on macOS.
bool has([[maybe_unused]] unsigned long word, [[maybe_unused]] int bit, [[maybe_unused]] const char* name) {
#if defined(__linux__)
  return getauxval(word) >> bit & 1;
#elif defined(__APPLE__)
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
#else
  return false;
#endif
}
constexpr unsigned long kWord1 = 16, kWord2 = 26;  // AT_HWCAP, AT_HWCAP2

bool has_dotprod() { return has(kWord1, 20, "hw.optional.arm.FEAT_DotProd"); }
[[maybe_unused]] bool has_i8mm() {  // and bfloat16
  return has_dotprod() && has(kWord2, 13, "hw.optional.arm.FEAT_I8MM") && has(kWord2, 14, "hw.optional.arm.FEAT_BF16");
}

// The kernels of NEON with others for what products take the time of.
Isa with_products(const char* name, const ProductKernels& kernels) {
  Isa isa = isa_neon;
  isa.name = name, isa.linear = kernels.linear, isa.attend = kernels.attend;
  return isa;
}
#endif

// Those compiled in, the best one first.
std::vector<Candidate> candidates() {
#if defined(__x86_64__)
  const bool avx2 = has_avx2(), avx512 = has_avx512();
  std::vector<Candidate> found;
#if AO_HAS_AMX
  found.push_back({&with_tiles(), avx512 && has_amx()});
#endif
  found.insert(found.end(), {{&isa_avx512, avx512}, {&isa_avx512_vnni, has_avx512_vnni()}});
#if AO_UNIT_avx2_vnni
  found.push_back({&with_dot_products(), avx2 && has_avx_vnni()});
#endif
  found.insert(found.end(), {{&isa_avx2, avx2}, {&isa_generic, true}});
  return found;
#elif defined(__aarch64__)
  std::vector<Candidate> found;
#if AO_UNIT_neon_i8mm
  static const Isa i8mm = with_products("neon_i8mm", isa_neon_i8mm);
  found.push_back({&i8mm, has_i8mm()});
#endif
#if AO_UNIT_neon_dotprod
  static const Isa dotprod = with_products("neon_dotprod", isa_neon_dotprod);
  found.push_back({&dotprod, has_dotprod()});
#endif
  found.insert(found.end(), {{&isa_neon, true}, {&isa_generic, true}});
  return found;
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
    const Leaf vendor(0);  // "GenuineIntel"
    return vendor.b == signature_INTEL_ebx && vendor.c == signature_INTEL_ecx && vendor.d == signature_INTEL_edx;
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
