# Decides whether and for which GPUs CUDA code is compiled. Sets TWOFOLD_HAS_CUDA, and TWOFOLD_RUNS_CUDA where it is not for
# tests alone.
#
# TWOFOLD_CUDA   AUTO: where a GPU and a fitting nvcc are found, and for tests (TWOFOLD_TESTS) where the nvcc is, so that no edit
#                breaks that half unseen; ON: fail without nvcc; OFF: do not look.
# Architectures  TORCH_CUDA_ARCH_LIST if the environment has it; else, for AUTO in a source tree, this machine's own GPU or,
#                without one, 90 alone (a check that everything compiles, a minute instead of five); else 80, 86, 89, 90, 120.
# A build directory that persists keeps an option, so whoever calls CMake gives TWOFOLD_CUDA every time (pyproject.toml and
# scripts/build_steps.sh: from the environment, default AUTO), and the architectures are decided anew each time.
set(TWOFOLD_CUDA AUTO CACHE STRING "AUTO, ON or OFF")
if(NOT TWOFOLD_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TWOFOLD_CUDA was given '${TWOFOLD_CUDA}'; it takes AUTO, ON or OFF")
endif()

set(TWOFOLD_HAS_CUDA OFF)
set(MIN_NVCC 12.4)

# Compute capabilities of this machine's GPUs; none without a driver.
set(COMPUTE_CAPS "")
if(TWOFOLD_CUDA STREQUAL "AUTO")
  find_program(NVIDIA_SMI nvidia-smi NO_CACHE)
  if(NVIDIA_SMI)
    execute_process(COMMAND ${NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE SMI_SAYS
                    RESULT_VARIABLE SMI_FAILED ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT SMI_FAILED AND SMI_SAYS MATCHES "^[0-9]+\\.[0-9]+")
      string(REGEX MATCHALL "[0-9]+\\.[0-9]+" COMPUTE_CAPS "${SMI_SAYS}")
      list(REMOVE_DUPLICATES COMPUTE_CAPS)
    endif()
  endif()
endif()

if(TWOFOLD_CUDA STREQUAL "OFF")
  message(STATUS "CUDA: TWOFOLD_CUDA=OFF; building for the CPU")
elseif(TWOFOLD_CUDA STREQUAL "AUTO" AND NOT COMPUTE_CAPS AND NOT TWOFOLD_TESTS)
  message(STATUS "CUDA: no GPU found (nvidia-smi); building for the CPU (TWOFOLD_CUDA=ON compiles for one all the same)")
else()
  find_program(TWOFOLD_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin PATHS /usr/local/cuda NO_CACHE)
  set(CUDA_PROBLEM "")
  if(NOT TWOFOLD_NVCC)
    set(CUDA_PROBLEM "nvcc is neither on PATH nor under CUDA_HOME")
  else()
    execute_process(COMMAND ${TWOFOLD_NVCC} --version OUTPUT_VARIABLE NVCC_SAYS ERROR_QUIET)
    if(NVCC_SAYS MATCHES "release ([0-9]+\\.[0-9]+)" AND NOT CMAKE_MATCH_1 VERSION_LESS MIN_NVCC)
      set(TWOFOLD_HAS_CUDA ON)
    else()
      set(CUDA_PROBLEM "${TWOFOLD_NVCC} is older than ${MIN_NVCC}, or does not run")
    endif()
  endif()
  if(CUDA_PROBLEM AND TWOFOLD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TWOFOLD_CUDA=ON: ${CUDA_PROBLEM}; install the CUDA toolkit (${MIN_NVCC} or newer) or use "
                        "TWOFOLD_CUDA=AUTO")
  endif()
  if(CUDA_PROBLEM)
    message(STATUS "CUDA: ${CUDA_PROBLEM}; building for the CPU")
  endif()
endif()

set(TWOFOLD_RUNS_CUDA OFF)
if(TWOFOLD_HAS_CUDA AND (TWOFOLD_CUDA STREQUAL "ON" OR COMPUTE_CAPS))
  set(TWOFOLD_RUNS_CUDA ON)
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

if(TWOFOLD_HAS_CUDA)
  if(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    twofold_parse_arch_list("$ENV{TORCH_CUDA_ARCH_LIST}" CMAKE_CUDA_ARCHITECTURES)
  elseif(TWOFOLD_CUDA STREQUAL "AUTO" AND TWOFOLD_INPLACE)
    set(CMAKE_CUDA_ARCHITECTURES 90)
    if(COMPUTE_CAPS)
      twofold_parse_arch_list("${COMPUTE_CAPS}" CMAKE_CUDA_ARCHITECTURES)
    endif()
  else()
    set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90-real 120)
  endif()
  set(CMAKE_CUDA_COMPILER ${TWOFOLD_NVCC})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  message(STATUS "CUDA: ${TWOFOLD_NVCC} (${CMAKE_CUDA_COMPILER_VERSION}) for ${CMAKE_CUDA_ARCHITECTURES}")
endif()
