// What a launch on the SIMT machine answers, as exceptions.
#include "cuda_error.h"
#include "ops/tensor_view.h"
#include "simt/simt.h"

namespace twofold {

void check_cuda(int error, const std::string& doing) {
  if (error == 0) return;
  const std::string& report = simt::last_report();
  throw KernelFailure(
      doing + ": the SIMT machine refused it (" + std::to_string(error) + "); " +
      (report.empty() ? "a shape, format or pointer is not one that the kernel takes" : report));
}

}  // namespace twofold
