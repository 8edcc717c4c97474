#include "expert_prefill.cuh"

namespace twofold::cuda {

PrefillRunners float_prefill_runners(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF16:
      return prefill_runners_of<WeightFormat::kF16>();
    case WeightFormat::kBF16:
      return prefill_runners_of<WeightFormat::kBF16>();
    case WeightFormat::kFP8:
      return prefill_runners_of<WeightFormat::kFP8>();
    default:
      return {};
  }
}

}  // namespace twofold::cuda
