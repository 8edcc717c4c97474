// The project's kernels, run whole on the SIMT machine against scalar references. The cases are in *_cases.cpp.
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>

#include "watched_run.h"

CASE(every_kernel_of_the_sources_is_executed) {
  test::one_schedule() = true;
  // One of the formats: each has a case, and the same kernels.
  const std::set<std::string> others{__func__, "decode_tiles_take_turns_where_shared_memory_is_small"};
  for (const test::Case& other : test::cases()) {
    const std::string name = other.name;
    if (others.count(name) == 0 && (name.rfind("experts_of_", 0) != 0 || name == "experts_of_BF16"))
      other.run();
  }
  // Two have one thread, and one works with any number of them.
  const std::set<std::string> unbounded{"begin_step_kernel", "wait_kernel", "mla_join_kernel"};
  const std::regex kernel(R"(__global__ void\s+(__launch_bounds__\([^;{]*?\)\s+)?(\w+)\()");
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TWOFOLD_CUDA_SOURCES)) {
    const std::string extension = entry.path().extension().string();
    if (extension != ".cu" && extension != ".cuh") continue;
    std::ifstream file(entry.path());
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    size_t declared = 0;
    for (size_t at = text.find("__global__"); at != std::string::npos; at = text.find("__global__", at + 1))
      ++declared;
    for (std::sregex_iterator i(text.begin(), text.end(), kernel), end; i != end; ++i, --declared, ++count) {
      const std::string name = (*i)[2].str();
      const bool bounded = (*i)[1].matched;
      const auto ran = test::kernels_run().find(name);
      if (ran == test::kernels_run().end())
        test::fail(entry.path().c_str(), 0, "no case here executes " + name);
      else if (bounded == (unbounded.count(name) != 0))
        test::fail(entry.path().c_str(), 0, name + " declares launch bounds or is named here, not both");
      else if (bounded != (ran->second > 0))
        test::fail(entry.path().c_str(), 0, "the machine does not see the launch bounds of " + name);
    }
    if (declared != 0) test::fail(entry.path().c_str(), 0, "a __global__ whose name this case does not find");
  }
  CHECK(count >= 17);
}

int main(int argc, char** argv) { return test::main(argc, argv); }
