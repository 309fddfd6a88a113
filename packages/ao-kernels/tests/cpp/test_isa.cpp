#include <cstdlib>
#include <string>

#include "isa.h"
#include "support.h"

TEST_CASE("the instruction set is the one that AO_CPU_ISA names") {
  const char* wanted = std::getenv("AO_CPU_ISA");
  CHECK(ao::isa_error() == nullptr);
  if (wanted != nullptr) CHECK(std::string(ao::isa().name) == wanted);
}

TEST_CASE("the choice is made once") { CHECK(&ao::isa() == &ao::isa()); }
