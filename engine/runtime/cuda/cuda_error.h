// Errors of the CUDA runtime as exceptions.
#pragma once
#include <string>

namespace twofold {

// Does nothing if `error` (a cudaError_t) is 0; else throws KernelFailure with the failed operation and CUDA's
// message.
void check_cuda(int error, const std::string& doing);

}  // namespace twofold
