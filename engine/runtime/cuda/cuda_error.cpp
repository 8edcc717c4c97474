#include "cuda_error.h"

#include <cuda_runtime_api.h>

#include "ops/tensor_view.h"

namespace twofold {

void check_cuda(int error, const std::string& doing) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  const auto code = static_cast<cudaError_t>(error);
  std::string text = doing + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")";
  if (code == cudaErrorInvalidValue) text += "; a shape, format or pointer is not one that the kernel takes";
  throw KernelFailure(text);
}

}  // namespace twofold
