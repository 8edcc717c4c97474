#include "expert_decode.cuh"

namespace twofold::cuda {

DecodeRunners k_decode_runners(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_K:
      return runners_of<WeightFormat::kQ4_K>();
    case WeightFormat::kQ5_K:
      return runners_of<WeightFormat::kQ5_K>();
    case WeightFormat::kQ6_K:
      return runners_of<WeightFormat::kQ6_K>();
    default:
      return {};
  }
}

}  // namespace twofold::cuda
