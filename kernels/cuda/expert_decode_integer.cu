#include "expert_decode.cuh"

namespace twofold::cuda {

DecodeRunners integer_decode_runners(WeightFormat format) {
  return runners_of_share<Share::kSubblocks, DecodeRunners>(
      format, []<class Format>(Format) { return runners_of<kernels::kNumberOf<Format>>(); });
}

}  // namespace twofold::cuda
