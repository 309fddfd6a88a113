# Why there is no library: a sentence in a file, which is put into the wheel instead, and `ao plugins` shows.
if(SKBUILD_STATE STREQUAL "wheel")
  set(AO_REASON "${CMAKE_CURRENT_SOURCE_DIR}/build/not_built.txt") # pyproject.toml names it
else()
  set(AO_REASON "${CMAKE_BINARY_DIR}/not_built.txt")
endif()

# Writes the reason, unless nothing fails from here on.
function(ao_reason text)
  file(WRITE "${AO_REASON}" "${text}\n")
endfunction()

# Ends with a reason.
function(ao_cannot_build text)
  ao_reason("${text}")
  message(FATAL_ERROR "${text}")
endfunction()

ao_reason("CMake failed to configure its build")
