// How many threads a kernel's launch bounds allow: the nops before its first instruction (include/cuda_runtime.h), of which
// the compiler keeps a list.
#include <algorithm>

#include "machine/machine.h"

// Bounds of a section, which the linker gives; null where nothing declares launch bounds.
extern "C" {
[[gnu::weak, gnu::visibility("hidden")]] extern const uint8_t* const __start___patchable_function_entries[];
[[gnu::weak, gnu::visibility("hidden")]] extern const uint8_t* const __stop___patchable_function_entries[];
}

namespace simt {

int launch_bound(const void* function) {
  constexpr uint8_t kNop = 0x90;
  const auto* first = static_cast<const uint8_t*>(function);
  for (const auto* nops = __start___patchable_function_entries; nops != __stop___patchable_function_entries;
       ++nops) {
    const auto count = first - *nops;
    // Behind another kernel's nops comes its code.
    if (count > 0 && count <= kMostThreads &&
        std::all_of(*nops, first, [](uint8_t byte) { return byte == kNop; }))
      return int(count);
  }
  return 0;
}

}  // namespace simt
