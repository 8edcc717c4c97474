# Decides whether and for which GPUs CUDA code is compiled. Sets TWOFOLD_HAS_CUDA, and TWOFOLD_RUNS_CUDA where it is not for
# tests alone.
#
# TWOFOLD_CUDA   AUTO: where a GPU and a fitting nvcc are found, and for tests (TWOFOLD_TESTS) where the nvcc is, so that no edit
#                breaks that half unseen; ON: fail without nvcc; OFF: do not look.
# Architectures  TORCH_CUDA_ARCH_LIST if the environment has it; else, for AUTO in a source tree, this machine's own GPU or,
#                without one, 90 alone (a check that everything compiles, a minute instead of five); else those of
#                kernels/cuda/architectures.txt.
# A build directory that persists keeps an option, so whoever calls CMake gives TWOFOLD_CUDA every time (pyproject.toml and
# scripts/build_steps.sh: from the environment, default AUTO), and the architectures are decided anew each time.
# scripts/cuda_compiler.py finds the GPU and the compiler, and tries the compiler before enable_language(CUDA), whose failure
# would end set-up. A build without CUDA keeps the reason in cuda_missing.json, beside the modules (engine/twofold/device/backend.py).
set(TWOFOLD_CUDA AUTO CACHE STRING "AUTO, ON or OFF")
if(NOT TWOFOLD_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TWOFOLD_CUDA was given '${TWOFOLD_CUDA}'; it takes AUTO, ON or OFF")
endif()

# "8.0;8.6 9.0+PTX" as PyTorch takes it, to CMake's "80-real;86-real;90".
function(twofold_parse_arch_list given result)
  string(REGEX REPLACE "[ ,;]+" ";" entries "${given}")
  set(parsed "")
  foreach(entry IN LISTS entries)
    if(NOT entry MATCHES "^([0-9]+)\\.([0-9]+[af]?)(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST holds '${entry}'; expected numbers such as 8.6 or 9.0+PTX")
    endif()
    set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    if(CMAKE_MATCH_3)
      list(APPEND parsed "${number}")
    else()
      list(APPEND parsed "${number}-real")
    endif()
  endforeach()
  set(${result} "${parsed}" PARENT_SCOPE)
endfunction()

# "" lets scripts/cuda_compiler.py choose by this machine's GPUs.
set(CUDA_ARCHITECTURES "")
if(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
  twofold_parse_arch_list("$ENV{TORCH_CUDA_ARCH_LIST}" CUDA_ARCHITECTURES)
elseif(NOT (TWOFOLD_CUDA STREQUAL "AUTO" AND TWOFOLD_INPLACE))
  # Ascending. Without -real also as PTX, which a driver compiles for later GPUs: 90 for 10.0, which does not run 12.0's.
  # scripts/check_cuda.py reads the same file.
  file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/../kernels/cuda/architectures.txt CUDA_ARCHITECTURES)
  separate_arguments(CUDA_ARCHITECTURES)
endif()

if(TWOFOLD_CUDA STREQUAL "OFF")
  set(CUDA_SAYS [[{"problem": "it was made with TWOFOLD_CUDA=OFF", "remedy": "build it without that setting"}]])
else()
  set(CUDA_HOST_COMPILER "$ENV{CUDAHOSTCXX}")
  if(NOT CUDA_HOST_COMPILER)
    set(CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
  endif()
  string(REPLACE ";" "," LISTED "${CUDA_ARCHITECTURES}")
  set(FIND_OPTIONS --host-compiler "${CUDA_HOST_COMPILER}" "--architectures=${LISTED}" "--trusted=${TWOFOLD_TRIED_NVCC}")
  if(TWOFOLD_CUDA STREQUAL "ON" OR TWOFOLD_TESTS)
    list(APPEND FIND_OPTIONS --without-gpu)
  endif()
  execute_process(COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/../scripts/cuda_compiler.py" find ${FIND_OPTIONS}
                  OUTPUT_VARIABLE CUDA_SAYS COMMAND_ERROR_IS_FATAL ANY)
endif()
string(JSON CUDA_PROBLEM GET "${CUDA_SAYS}" problem)
string(JSON CUDA_REMEDY GET "${CUDA_SAYS}" remedy)

set(TWOFOLD_HAS_CUDA OFF)
set(TWOFOLD_RUNS_CUDA OFF)
set(CUDA_MISSING "${PROJECT_BINARY_DIR}/modules/cuda_missing.json")
if(CUDA_PROBLEM AND TWOFOLD_CUDA STREQUAL "ON")
  message(FATAL_ERROR "TWOFOLD_CUDA=ON: ${CUDA_PROBLEM}; ${CUDA_REMEDY}, or use TWOFOLD_CUDA=AUTO")
elseif(CUDA_PROBLEM)
  message(STATUS "CUDA: ${CUDA_PROBLEM}; building for the CPU")
  file(WRITE "${CUDA_MISSING}" "${CUDA_SAYS}")
  install(FILES "${CUDA_MISSING}" DESTINATION twofold)
else()
  file(REMOVE "${CUDA_MISSING}")
  string(JSON TWOFOLD_NVCC GET "${CUDA_SAYS}" nvcc)
  string(JSON CMAKE_CUDA_ARCHITECTURES GET "${CUDA_SAYS}" architectures)
  string(JSON HAS_GPU GET "${CUDA_SAYS}" gpu)
  set(TWOFOLD_TRIED_NVCC "${TWOFOLD_NVCC}" CACHE INTERNAL "nvcc that built a kernel")
  set(TWOFOLD_HAS_CUDA ON)
  if(TWOFOLD_CUDA STREQUAL "ON" OR HAS_GPU)
    set(TWOFOLD_RUNS_CUDA ON)
  endif()
  set(CMAKE_CUDA_COMPILER "${TWOFOLD_NVCC}")
  if(NOT CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER "${CUDA_HOST_COMPILER}")
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  message(STATUS "CUDA: ${TWOFOLD_NVCC} (${CMAKE_CUDA_COMPILER_VERSION}) for ${CMAKE_CUDA_ARCHITECTURES}")
endif()
