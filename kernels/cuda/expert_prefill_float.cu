#include "expert_prefill.cuh"

namespace twofold::cuda {

PrefillRunners float_prefill_runners(WeightFormat format) {
  return runners_of_share<Share::kFloats, PrefillRunners>(
      format, []<class Format>(Format) { return prefill_runners_of<kernels::kNumberOf<Format>>(); });
}

}  // namespace twofold::cuda
