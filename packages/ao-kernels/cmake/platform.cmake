# What is compiled for, and by which compiler; included before project().
#
# AO_WHEEL_PLATFORM names the platform of a wheel, such as manylinux_2_28_aarch64, where $CXX is a compiler for it;
# "any" asks for a pure wheel. Without it the library is for the machine that compiles, or that of a toolchain file.
if(CMAKE_HOST_WIN32)
  ao_cannot_build("it is not built for Windows yet")
endif()

# Other names of the same processors.
function(ao_machine name)
  string(TOLOWER "${name}" name)
  string(REGEX REPLACE "^amd64$" "x86_64" name "${name}")
  string(REGEX REPLACE "^arm64$" "aarch64" name "${name}")
  set(found other)
  if(AO_ISAS_${name})
    set(found ${name})
  endif()
  set(AO_MACHINE ${found} PARENT_SCOPE)
endfunction()

cmake_host_system_information(RESULT here QUERY OS_PLATFORM)
ao_machine("${here}")
set(here ${AO_MACHINE})
if(CMAKE_SYSTEM_PROCESSOR)
  ao_machine("${CMAKE_SYSTEM_PROCESSOR}")
endif()
set(darwin ${CMAKE_HOST_APPLE})
set(tag "$ENV{AO_WHEEL_PLATFORM}")
if(tag STREQUAL "any")
  ao_cannot_build("AO_WHEEL_PLATFORM=any asked for a wheel without it")
elseif(tag MATCHES "^(linux|manylinux[a-z0-9_]*|macosx)_([0-9]+_[0-9]+_)?(x86_64|aarch64|arm64)$")
  string(COMPARE EQUAL "${CMAKE_MATCH_1}" macosx darwin)
  ao_machine("${CMAKE_MATCH_3}")
  if(NOT AO_MACHINE STREQUAL here OR (darwin AND NOT CMAKE_HOST_APPLE) OR (CMAKE_HOST_APPLE AND NOT darwin))
    set(CMAKE_SYSTEM_NAME Linux)
    if(darwin)
      set(CMAKE_SYSTEM_NAME Darwin)
      set(CMAKE_INSTALL_NAME_TOOL "${CMAKE_COMMAND}" CACHE FILEPATH "is not run")
    endif()
    set(CMAKE_SYSTEM_PROCESSOR ${AO_MACHINE})
  endif()
elseif(NOT tag STREQUAL "")
  ao_cannot_build("AO_WHEEL_PLATFORM=${tag}: use the platform of a wheel, such as manylinux_2_28_x86_64, \
macosx_11_0_arm64 or any")
endif()
if(darwin)
  set(CMAKE_OSX_DEPLOYMENT_TARGET 11.0 CACHE STRING "the oldest macOS that the library is compiled for")
endif()

# C++20 with the extensions that the sources use: those of g++ from 12 on, and of clang++ from 14 on
file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/probe.cpp" @ONLY CONTENT [[
#include <bit>
#include <concepts>
typedef int Lanes __attribute__((vector_size(16)));
Lanes swapped(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
int main() { return std::bit_width(0u); }
]])

# A compiler is $CXX, or the first of these that knows C++20 and every instruction set that is needed.
if(NOT CMAKE_CXX_COMPILER AND NOT CMAKE_TOOLCHAIN_FILE)
  set(candidates g++ c++ clang++)
  set(chosen "$ENV{CXX}")
  separate_arguments(words UNIX_COMMAND "${chosen}")
  if(NOT chosen STREQUAL "")
    list(GET words 0 candidates)
  endif()
  set(found "")
  foreach(candidate IN LISTS candidates)
    find_program(program "${candidate}" NO_CACHE)
    if(program)
      set(options ${words})
      list(POP_FRONT options)
      execute_process(
        COMMAND "${program}" ${options} -std=c++20 ${AO_REQUIRED_${AO_MACHINE}} -c probe.cpp -o probe.o
        WORKING_DIRECTORY "${CMAKE_BINARY_DIR}" RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
      if(NOT failed)
        break()
      endif()
      list(APPEND found "${candidate}")
    endif()
    unset(program)
  endforeach()
  if(program AND chosen STREQUAL "")
    set(CMAKE_CXX_COMPILER "${program}")
  elseif(NOT program AND NOT found STREQUAL "")
    string(REPLACE ";" ", " found "${found}")
    ao_cannot_build("${found} cannot compile C++20 for the instruction sets of ${AO_MACHINE}")
  elseif(NOT program)
    string(REPLACE ";" ", " candidates "${candidates}")
    ao_cannot_build("no C++ compiler was found (tried ${candidates})")
  endif()
endif()
