// What the CUDA runtime answers, as exceptions.
#pragma once
#include <string>

namespace twofold {

// Nothing if `error` (a cudaError_t) is 0; else throws KernelFailure saying what was done and what CUDA says
// of it.
void check_cuda(int error, const std::string& doing);

}  // namespace twofold
