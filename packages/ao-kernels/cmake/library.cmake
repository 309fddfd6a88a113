# The library, linked with torch: it registers its operators when it is loaded, and nobody calls it by name.
if(NOT Python_EXECUTABLE)
  find_package(Python REQUIRED COMPONENTS Interpreter)
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/find_torch.py"
  OUTPUT_VARIABLE torch ERROR_VARIABLE problem RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
if(failed)
  string(STRIP "${problem}" problem)
  ao_cannot_build("${problem}")
endif()

# the first error of a compiler becomes the reason why a wheel has no library
set(tell "")
if(SKBUILD_STATE STREQUAL "wheel")
  set(tell "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/tell.py" "${AO_REASON}")
endif()

file(GLOB torch_sources CONFIGURE_DEPENDS csrc/torch/*.cpp)
file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/cuda/*.cpp)
set(images "${CMAKE_CURRENT_BINARY_DIR}/cuda_images.cpp")
# asked every time: a compiler of CUDA may have been installed, or changed
add_custom_target(ao_cuda_images
  COMMAND ${tell} "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cuda_build.py" --source "${images}"
  BYPRODUCTS "${images}" VERBATIM)

add_library(ao_cpu SHARED ${torch_sources} ${cuda_sources} "${images}")
add_dependencies(ao_cpu ao_cuda_images)
target_compile_options(ao_cpu PRIVATE ${FLAGS} ${SANITIZERS})
target_include_directories(ao_cpu PRIVATE csrc/cpu csrc csrc/torch)
target_include_directories(ao_cpu SYSTEM PRIVATE "${torch}/include")
# the oldest torch whose stable ABI the library uses, as torch encodes it: 2.11
target_compile_definitions(ao_cpu PRIVATE TORCH_TARGET_VERSION=0x20b000000000000)
# messages and registrations name files: without the places of the machine that built them
target_compile_options(ao_cpu PRIVATE
  "-ffile-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}/=" "-ffile-prefix-map=${torch}/include/=")
target_link_libraries(ao_cpu PRIVATE ao_objects)
set_target_properties(ao_cpu PROPERTIES SUFFIX .so)
set_target_properties(ao_objects ao_cpu PROPERTIES
  CXX_COMPILER_LAUNCHER "${tell}" CXX_LINKER_LAUNCHER "${tell}")

if(CMAKE_CROSSCOMPILING)
  # an empty libtorch_cpu of another machine: only its name is put into the library
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/empty.cpp" CONTENT "")
  add_library(torch_cpu SHARED "${CMAKE_CURRENT_BINARY_DIR}/empty.cpp")
else()
  target_link_directories(ao_cpu PRIVATE "${torch}/lib")
endif()
target_link_libraries(ao_cpu PRIVATE torch_cpu)
if(APPLE)
  # zig's linker knows no lists of symbols; all are hidden without it but those of libc++
  set(options -Wl,-exported_symbols_list,/dev/null)
  if(CMAKE_CROSSCOMPILING)
    set(options -Wl,-undefined,dynamic_lookup)
  endif()
  set(strip -Wl,-S -Wl,-x)
else()
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/exports.map" CONTENT "{ local: *; };\n")
  set(options -Wl,--no-as-needed "-Wl,--version-script=${CMAKE_CURRENT_BINARY_DIR}/exports.map")
  if(NOT AO_SANITIZE AND NOT CMAKE_CROSSCOMPILING)
    list(APPEND options -Wl,-z,defs)
  endif()
  set(strip -Wl,-s)
  set_target_properties(ao_cpu PROPERTIES NO_SONAME ON)
endif()
if(NOT SKBUILD_STATE STREQUAL "wheel")
  set(strip "")
endif()
target_link_options(ao_cpu PRIVATE -pthread ${SANITIZERS} ${options} ${strip})
install(FILES $<TARGET_FILE:ao_cpu> DESTINATION ao_kernels/cpu)
