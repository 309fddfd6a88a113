// The tests of the plain C++ part: `main --isa` says which instruction set is in use, all else is
// doctest's own command line. Exit status 77: AO_CPU_ISA cannot be obeyed here.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstring>

#include "isa.h"

int main(int argc, char** argv) {
  if (const char* error = ao::isa_error()) {
    std::fprintf(stderr, "%s\n", error);
    return 77;
  }
  if (argc == 2 && std::strcmp(argv[1], "--isa") == 0) {
    std::printf("%s\n", ao::isa().name);
    return 0;
  }
  return doctest::Context(argc, argv).run();
}
