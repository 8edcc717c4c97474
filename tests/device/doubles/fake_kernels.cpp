// The expert kernels' launchers on host memory: each computes what the kernel of its name leaves, with the
// CPU's kernels, and has done so when it returns. Streams mean nothing here.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda_error.h"
#include "expert_layer.h"
#include "fake_clock.h"
#include "number_formats.h"
#include "ops/tensor_view.h"
#include "twofold/kernels.h"
#include "twofold/rounding.h"

namespace twofold {

void check_cuda(int error, const std::string& doing) {
  if (error == 0) return;
  throw KernelFailure(doing + ": the fake device refused it (" + std::to_string(error) +
                      "); a shape, format or pointer is not one that the kernel takes");
}

namespace cuda {
namespace {

using kernels::KernelTable;

constexpr int kInvalidValue = 1;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Bytes = std::unique_ptr<uint8_t[], Free>;

Bytes aligned(int64_t bytes) {
  return Bytes(static_cast<uint8_t*>(std::aligned_alloc(64, size_t((bytes + 63) / 64 * 64))));
}

// An encoded row as floats.
void widen(ActivationKind kind, const uint8_t* row, int K, float* out) {
  const int64_t P = kernels::activation_columns(K);
  for (int c = 0; c < K; ++c) {
    if (kind == ActivationKind::kF32) {
      std::memcpy(out + c, row + 4 * c, 4);
    } else if (kind == ActivationKind::kBF16) {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * c, 2);
      out[c] = float_of_bits(uint32_t(bits) << 16);
    } else {
      float scale;
      std::memcpy(&scale, row + P + 4 * (c / 32), 4);
      out[c] = scale * float(int8_t(row[c]));
    }
  }
}

void encode(ActivationKind kind, const float* rows, int num_rows, int K, uint8_t* out) {
  kernels::kernel_table().encode_as(kind)(rows, K, out, kernels::activation_row_bytes(kind, K), num_rows, 0,
                                          K, K);
}

// y[m][n] of encoded rows of `kind`, which the CPU's kernel of the format may want in another encoding.
void multiply(WeightFormat format, const void* panels, ActivationKind kind, const uint8_t* rows, int M, int N,
              int K, float* y) {
  const kernels::FormatKernels& kernel =
      kernels::kernel_table().of(kernels::multiplied_as(format, kernels::Rounding::kOfDevice));
  const int64_t row_bytes = kernels::activation_row_bytes(kind, K);
  Bytes wanted;
  if (kernel.activation != kind) {
    std::vector<float> wide(size_t(M) * size_t(K));
    for (int m = 0; m < M; ++m) widen(kind, rows + m * row_bytes, K, wide.data() + int64_t(m) * K);
    wanted = aligned(M * kernels::activation_row_bytes(kernel.activation, K));
    encode(kernel.activation, wide.data(), M, K, wanted.get());
    rows = wanted.get();
  }
  kernel.matmul(rows, kernels::activation_row_bytes(kernel.activation, K), panels, y, N, M, N, K);
}

// outputs[pair] for `count` pairs of one expert, whose tokens' rows of `kind` are given.
void run_expert(const ExpertLayout& layout, uint64_t address, ActivationKind kind, const uint8_t* rows,
                const int32_t* pairs, int count, int top_k, const ExpertBuffers& buffers) {
  const int H = layout.hidden, I = layout.intermediate;
  const int64_t row_bytes = kernels::activation_row_bytes(kind, H);
  const uint8_t* expert = reinterpret_cast<const uint8_t*>(address);
  const Bytes x = aligned(count * row_bytes);
  for (int i = 0; i < count; ++i)
    std::memcpy(x.get() + i * row_bytes, rows + pairs[i] / top_k * row_bytes, size_t(row_bytes));
  std::vector<float> gate(size_t(count) * size_t(I)), up(gate.size());
  multiply(layout.gate_up, expert, kind, x.get(), count, I, H, gate.data());
  multiply(layout.gate_up, expert + layout.up_offset, kind, x.get(), count, I, H, up.data());
  const auto add_bias = [&](std::vector<float>& values, int64_t place, int width) {
    if (layout.bias_offset == 0) return;
    const float* bias = reinterpret_cast<const float*>(expert + layout.bias_offset) + place;
    for (size_t i = 0; i < values.size(); ++i) values[i] += bias[i % size_t(width)];
  };
  add_bias(gate, 0, I);
  add_bias(up, kernels::up_bias_at(I), I);
  kernels::kernel_table().gated_as(layout.activation)(gate.data(), up.data(), gate.data(), count * I);
  // Through the caller's buffer, as the kernels do.
  const int64_t h_bytes = kernels::activation_row_bytes(kind, I);
  const Bytes h = aligned(count * h_bytes);
  encode(kind, gate.data(), count, I, h.get());
  std::vector<float> out(size_t(count) * size_t(H));
  for (int i = 0; i < count; ++i) {
    std::memcpy(static_cast<uint8_t*>(buffers.intermediate) + pairs[i] * h_bytes, h.get() + i * h_bytes,
                size_t(h_bytes));
  }
  multiply(layout.down, expert + layout.down_offset, kind, h.get(), count, H, I, out.data());
  add_bias(out, kernels::down_bias_at(I), H);
  for (int i = 0; i < count; ++i)
    std::copy_n(out.data() + int64_t(i) * H, H, buffers.outputs + int64_t(pairs[i]) * H);
}

}  // namespace

int launch_read_host(const void* mapped, void* to, int64_t bytes, Stream) {
  const auto aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  if (mapped == nullptr || to == nullptr || bytes < 1 || bytes % 16 != 0 || !aligned(mapped) || !aligned(to))
    return kInvalidValue;
  std::memcpy(to, mapped, size_t(bytes));
  return 0;
}

int launch_encode(const EncodedRows& encoded, Stream) {
  const auto& [kind, bf16_rows, num_tokens, columns, out] = encoded;
  if (bf16_rows == nullptr || out == nullptr || num_tokens < 1 || columns < 1) return kInvalidValue;
  std::vector<float> wide(size_t(num_tokens) * size_t(columns));
  kernels::kernel_table().bf16_to_f32(static_cast<const uint16_t*>(bf16_rows), wide.data(),
                                      int64_t(wide.size()));
  encode(kind, wide.data(), num_tokens, columns, static_cast<uint8_t*>(out));
  return 0;
}

int launch_decode_experts(const ExpertLayout& layout, const ExpertGroups& groups,
                          const ExpertBuffers& buffers, const DecodeShape& shape, Stream) {
  if (!can_decode(layout, groups, buffers, shape)) return kInvalidValue;
  for (int g = 0; g < *groups.num_groups; ++g) {
    run_expert(layout, groups.weights[g], activation_of(layout.gate_up),
               static_cast<const uint8_t*>(buffers.encoded), groups.pairs + groups.begin[g],
               groups.begin[g + 1] - groups.begin[g], shape.top_k, buffers);
  }
  return 0;
}

int launch_prefill_experts(const ExpertLayout& layout, const ExpertGroups& groups,
                           const ExpertBuffers& buffers, const PrefillTiles& tiles, const PrefillRows& given,
                           Stream) {
  const auto& [x, num_tokens, top_k] = given;
  if (!is_complete(layout) || layout.gate_up == WeightFormat::kF32 || layout.down == WeightFormat::kF32 ||
      num_tokens < 1 || top_k < 1 || tiles.count < 0 || (tiles.count > 0 && tiles.tiles == nullptr) ||
      (tiles.tokens != kFewTokens && tiles.tokens != kManyTokens) || x == nullptr ||
      buffers.intermediate == nullptr || buffers.outputs == nullptr || buffers.gate_up == nullptr) {
    return kInvalidValue;
  }
  const Bytes rows =
      aligned(num_tokens * kernels::activation_row_bytes(ActivationKind::kBF16, layout.hidden));
  launch_encode({ActivationKind::kBF16, x, num_tokens, layout.hidden, rows.get()}, nullptr);
  for (int t = 0; t < tiles.count; ++t) {
    const int group = tiles.tiles[2 * t], first = groups.begin[group] + tiles.tiles[2 * t + 1];
    run_expert(layout, groups.weights[group], ActivationKind::kBF16, rows.get(), groups.pairs + first,
               std::min(tiles.tokens, groups.begin[group + 1] - first), top_k, buffers);
  }
  return 0;
}

int launch_combine(const CombinedLayer& layer, Stream) {
  if (!can_combine(layer)) return kInvalidValue;
  const auto& [outputs, weights, where, from_cpu, num_tokens, top_k, hidden_size, hidden, joined_ns] = layer;
  if (joined_ns != nullptr) *joined_ns = fake::nanoseconds();
  for (int t = 0; t < num_tokens; ++t) {
    for (int c = 0; c < hidden_size; ++c) {
      float& sum = hidden[int64_t(t) * hidden_size + c];
      bool on_cpu = false;
      for (int pair = t * top_k; pair < (t + 1) * top_k; ++pair) {
        on_cpu |= where[pair] == kCpu;
        if (where[pair] == kHit || where[pair] == kFetched)
          sum = fused(weights[pair], outputs[int64_t(pair) * hidden_size + c], sum);
      }
      if (on_cpu && from_cpu != nullptr) sum += from_cpu[int64_t(t) * hidden_size + c];
    }
  }
  return 0;
}

}  // namespace cuda
}  // namespace twofold
