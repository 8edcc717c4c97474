// The prefill launcher.
#include "expert_prefill.cuh"
#include "machine.cuh"

namespace twofold::cuda {

namespace {

constexpr int kGatedThreads = 256;

// gate_up [pairs][2][intermediate] -> bf16 [pairs][intermediate] for the pairs in groups; others are another launch's.
// adapted: see ExpertBuffers.
__global__ void __launch_bounds__(kGatedThreads)
    gated_kernel(kernels::ExpertActivation activation, float limit, ExpertGroups groups, const float* gate_up,
                 int intermediate, float* adapted, uint16_t* out) {
  const int64_t i = int64_t(blockIdx.x) * kGatedThreads + threadIdx.x;
  const int64_t place = i / intermediate, row = i % intermediate;
  if (place >= groups.begin[*groups.num_groups]) return;
  const int64_t pair = groups.pairs[place], own = pair * 2 * intermediate + row;
  float gate = gate_up[own], up = gate_up[own + intermediate];
  if (adapted != nullptr) {
    gate += adapted[own];
    up += adapted[own + intermediate];
  }
  const float h = kernels::gated(activation, limit, gate, up, FastExp());
  if (adapted != nullptr) adapted[own] = h;
  out[pair * intermediate + row] = bf16_of_float(h);
}

PrefillRunners runners(WeightFormat format) {
  for (const auto find : {float_prefill_runners, integer_prefill_runners, k_prefill_runners}) {
    const PrefillRunners found = find(format);
    if (found.few != nullptr) return found;
  }
  return {};
}

}  // namespace

int launch_prefill_experts(const ExpertLayout& layout, const ExpertGroups& groups,
                           const ExpertBuffers& buffers, const PrefillTiles& tiles, const PrefillRows& rows,
                           Stream stream) {
  const auto& [x, num_tokens, top_k] = rows;
  const PrefillRunners first = runners(layout.gate_up), second = runners(layout.down);
  if (first.few == nullptr || second.few == nullptr || tiles.tiles == nullptr || tiles.count < 0 ||
      tiles.count > 65535 || (tiles.tokens != kFewTokens && tiles.tokens != kManyTokens) || x == nullptr ||
      buffers.gate_up == nullptr || buffers.intermediate == nullptr || buffers.outputs == nullptr ||
      num_tokens < 1 || top_k < 1 || layout.hidden % 16 != 0 || layout.intermediate % 16 != 0) {
    return cudaErrorInvalidValue;
  }
  if (tiles.count == 0) return 0;
  const bool few = tiles.tokens == kFewTokens;
  const int2* table = reinterpret_cast<const int2*>(tiles.tiles);
  const auto bias = [&](int64_t place) {
    return layout.bias_offset == 0 ? 0 : layout.bias_offset + 4 * place;
  };
  const PrefillMatrix gate_up{{0, layout.up_offset},
                              {bias(0), bias(kernels::up_bias_at(layout.intermediate))},
                              layout.intermediate,
                              layout.hidden,
                              top_k,
                              static_cast<const uint16_t*>(x),
                              buffers.gate_up,
                              2};
  if (int error = (few ? first.few : first.many)(gate_up, groups, table, tiles.count, stream)) return error;
  const int64_t elements = int64_t(num_tokens) * top_k * layout.intermediate;
  if (int error = launch(gated_kernel, unsigned((elements + kGatedThreads - 1) / kGatedThreads),
                         kGatedThreads, 0, stream, layout.activation, layout.limit, groups, buffers.gate_up,
                         layout.intermediate, buffers.adapted, static_cast<uint16_t*>(buffers.intermediate)))
    return error;
  const PrefillMatrix down{{layout.down_offset, 0},
                           {bias(kernels::down_bias_at(layout.intermediate)), 0},
                           layout.hidden,
                           layout.intermediate,
                           1,
                           static_cast<const uint16_t*>(buffers.intermediate),
                           buffers.outputs,
                           1};
  return (few ? second.few : second.many)(down, groups, table, tiles.count, stream);
}

}  // namespace twofold::cuda
