#include "expert_prefill.cuh"

namespace twofold::cuda {

PrefillRunners integer_prefill_runners(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ8_0:
      return prefill_runners_of<WeightFormat::kQ8_0>();
    case WeightFormat::kQ4_0:
      return prefill_runners_of<WeightFormat::kQ4_0>();
    case WeightFormat::kInt8:
      return prefill_runners_of<WeightFormat::kInt8>();
    case WeightFormat::kInt4:
      return prefill_runners_of<WeightFormat::kInt4>();
    default:
      return {};
  }
}

}  // namespace twofold::cuda
