// A build that leaves levels out: dispatch.cpp with absent.cpp in place of all vector levels.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "check.h"
#include "twofold/kernels.h"

namespace kernels = twofold::kernels;

CASE(a_level_that_is_not_compiled_is_not_chosen_and_is_named) {
  unsetenv("TWOFOLD_ISA");  // `make test-levels` sets it
  CHECK_EQUAL(std::string(kernels::kernel_table().name), "generic");
  CHECK(kernels::table_for_level("avx2") == nullptr);
  const kernels::CpuFeatures has = kernels::cpu_features();
  const bool runs = has.avx2 && has.fma && has.f16c;
  CHECK_EQUAL(kernels::level_left_out("avx2"), runs);
  CHECK(!kernels::level_left_out("generic"));
  const std::string reason = kernels::kernel_table_reason();
  CHECK_EQUAL(reason.find("; not compiled: avx2") != std::string::npos, runs);
}

CASE(asking_for_it_says_how_to_compile_it) {
  setenv("TWOFOLD_ISA", "amx", 1);
  std::string reported;
  try {
    kernels::kernel_table();
  } catch (const std::invalid_argument& error) {
    reported = error.what();
  }
  CHECK(reported.starts_with(
      "TWOFOLD_ISA=amx: expected one of generic (what this CPU and this build can run)"));
  CHECK_EQUAL(reported.find('\n'), std::string::npos);
  const bool runs = kernels::level_left_out("avx2");
  CHECK_EQUAL(reported.find("TWOFOLD_LEVELS=all make quick-build") != std::string::npos, runs);
}

int main(int argc, char** argv) { return test::main(argc, argv); }
