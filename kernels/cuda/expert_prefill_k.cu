#include "expert_prefill.cuh"

namespace twofold::cuda {

PrefillRunners k_prefill_runners(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_K:
      return prefill_runners_of<WeightFormat::kQ4_K>();
    case WeightFormat::kQ5_K:
      return prefill_runners_of<WeightFormat::kQ5_K>();
    case WeightFormat::kQ6_K:
      return prefill_runners_of<WeightFormat::kQ6_K>();
    default:
      return {};
  }
}

}  // namespace twofold::cuda
