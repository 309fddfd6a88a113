# Instruction sets and their compiler flags: the one table of them, read before there is a compiler.

# ao_isa(MACHINE NAME [OPTIONAL] FLAGS...): a set of a kind of processor, as csrc/cpu/isa_NAME.cpp implements it. The
# library does without an optional one where the compiler does not know its flags; all others it must know.
function(ao_isa machine name)
  cmake_parse_arguments(PARSE_ARGV 2 own OPTIONAL "" "")
  set(AO_ISAS_${machine} ${AO_ISAS_${machine}} ${name} PARENT_SCOPE)
  set(AO_FLAGS_${machine}_${name} ${own_UNPARSED_ARGUMENTS} PARENT_SCOPE)
  if(own_OPTIONAL)
    set(AO_OPTIONAL ${AO_OPTIONAL} ${name} PARENT_SCOPE)
  else()
    set(AO_REQUIRED_${machine} ${AO_REQUIRED_${machine}} ${own_UNPARSED_ARGUMENTS} PARENT_SCOPE)
  endif()
endfunction()

# gcc 12 takes the undefined registers in its own intrinsics for uninitialized variables; clang does not
# know all of these options
set(quiet -Wno-uninitialized -Wno-unknown-warning-option -Wno-maybe-uninitialized)
set(avx2 -mavx2 -mfma -mf16c ${quiet})
set(avx512_vnni -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c ${quiet})
set(avx512 ${avx512_vnni} -mavx512vbmi -mavx512bf16)
set(arm -march=armv8.2-a)
if("$ENV{CXX}" MATCHES "zig")
  set(arm -mcpu=baseline) # it has no -march
endif()

ao_isa(x86_64 generic -O2) # -O3 makes loops over four registers twice as much code
ao_isa(x86_64 avx2 ${avx2})
ao_isa(x86_64 avx2_vnni OPTIONAL ${avx2} -mavxvnni)
ao_isa(x86_64 avx512_vnni ${avx512_vnni})
ao_isa(x86_64 avx512 ${avx512})
ao_isa(x86_64 amx OPTIONAL ${avx512} -mamx-tile -mamx-bf16 -mamx-int8)

ao_isa(aarch64 generic -O2)
ao_isa(aarch64 neon)
ao_isa(aarch64 neon_dotprod OPTIONAL ${arm}+dotprod)
ao_isa(aarch64 neon_i8mm OPTIONAL ${arm}+dotprod+i8mm+bf16)

# of any other processor
set(AO_ISAS_other generic)
