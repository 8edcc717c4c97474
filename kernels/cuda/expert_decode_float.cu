#include "expert_decode.cuh"

namespace twofold::cuda {

DecodeRunners float_decode_runners(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return runners_of<WeightFormat::kF32>();
    case WeightFormat::kF16:
      return runners_of<WeightFormat::kF16>();
    case WeightFormat::kBF16:
      return runners_of<WeightFormat::kBF16>();
    case WeightFormat::kFP8:
      return runners_of<WeightFormat::kFP8>();
    default:
      return {};
  }
}

}  // namespace twofold::cuda
