#include "expert_prefill.cuh"

namespace twofold::cuda {

PrefillRunners integer_prefill_runners(WeightFormat format) {
  return runners_of_share<Share::kSubblocks, PrefillRunners>(
      format, []<class Format>(Format) { return prefill_runners_of<kernels::kNumberOf<Format>>(); });
}

}  // namespace twofold::cuda
