// The decode launcher, and the kernels around the experts of a layer: encoding their inputs, adding their
// outputs.

#include "expert_decode.cuh"
#include "expert_layer.h"
#include "machine.cuh"

namespace twofold::cuda {

namespace {

constexpr int kEncodeThreads = 256;
constexpr int kCombineThreads = 256;
constexpr int kCopyThreads = 256;

__global__ void __launch_bounds__(kCopyThreads)
    read_host_kernel(const uint4* from, uint4* to, int64_t words) {
  const int64_t i = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x;
  if (i < words) to[i] = from[i];
}

// One warp per subblock of 32 columns of one token, zeros up to the padded width.
template <ActivationKind kKind>
__global__ void __launch_bounds__(kEncodeThreads)
    encode_kernel(const uint16_t* x, int num_tokens, int columns, uint8_t* out, int64_t row_bytes) {
  const int P = int(kernels::activation_columns(columns));
  const int subblocks = P / 32;
  const int subblock = int(blockIdx.x) * (kEncodeThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (subblock >= num_tokens * subblocks) return;
  const int token = subblock / subblocks, column = subblock % subblocks * 32;
  const int at = column + threadIdx.x % kWarpSize;
  const float value = at < columns ? float_of_bits(uint32_t(x[int64_t(token) * columns + at]) << 16) : 0.0f;
  store_encoded<kKind>(value, out + token * row_bytes, column, P);
}

__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const CombinedLayer layer) {
  if (layer.joined_ns != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *layer.joined_ns = nanoseconds();
  const int64_t i = int64_t(blockIdx.x) * kCombineThreads + threadIdx.x;
  if (i >= int64_t(layer.num_tokens) * layer.hidden_size) return;
  const int token = int(i / layer.hidden_size), column = int(i % layer.hidden_size);
  float sum = layer.hidden[i];
  bool on_cpu = false;
  for (int k = 0; k < layer.top_k; ++k) {
    const int pair = token * layer.top_k + k;
    if (layer.where[pair] == kCpu) {
      on_cpu = true;
    } else if (layer.where[pair] != kPadding) {
      sum = fused(layer.weights[pair], layer.outputs[int64_t(pair) * layer.hidden_size + column], sum);
    }
  }
  if (on_cpu && layer.from_cpu != nullptr) sum += layer.from_cpu[i];
  layer.hidden[i] = sum;
}

DecodeRunners runners(WeightFormat format) {
  for (const auto find : {float_decode_runners, integer_decode_runners, k_decode_runners}) {
    const DecodeRunners found = find(format);
    if (found.gate_up != nullptr) return found;
  }
  return {};
}

}  // namespace

int launch_read_host(const void* mapped, void* to, int64_t bytes, Stream stream) {
  constexpr int64_t kWord = sizeof(uint4);
  const auto aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % kWord == 0; };
  if (mapped == nullptr || to == nullptr || bytes < 1 || bytes % kWord != 0 || !aligned(mapped) ||
      !aligned(to))
    return cudaErrorInvalidValue;
  const int64_t words = bytes / kWord;
  return launch(read_host_kernel, unsigned((words + kCopyThreads - 1) / kCopyThreads), kCopyThreads, 0,
                stream, static_cast<const uint4*>(mapped), static_cast<uint4*>(to), words);
}

int launch_encode(const EncodedRows& encoded, Stream stream) {
  const auto& [kind, bf16_rows, num_tokens, columns, out] = encoded;
  if (bf16_rows == nullptr || out == nullptr || num_tokens < 1 || columns < 1) return cudaErrorInvalidValue;
  const int64_t row_bytes = kernels::activation_row_bytes(kind, columns);
  const int subblocks = int(kernels::activation_columns(columns) / 32) * num_tokens;
  constexpr int kWarps = kEncodeThreads / kWarpSize;
  const int blocks = (subblocks + kWarps - 1) / kWarps;
  const uint16_t* x = static_cast<const uint16_t*>(bf16_rows);
  uint8_t* rows = static_cast<uint8_t*>(out);
  switch (kind) {
    case ActivationKind::kF32:
      return launch(encode_kernel<ActivationKind::kF32>, blocks, kEncodeThreads, 0, stream, x, num_tokens,
                    columns, rows, row_bytes);
    case ActivationKind::kBF16:
      return launch(encode_kernel<ActivationKind::kBF16>, blocks, kEncodeThreads, 0, stream, x, num_tokens,
                    columns, rows, row_bytes);
    default:
      return launch(encode_kernel<ActivationKind::kQ8>, blocks, kEncodeThreads, 0, stream, x, num_tokens,
                    columns, rows, row_bytes);
  }
}

int launch_decode_experts(const ExpertLayout& layout, const ExpertGroups& groups,
                          const ExpertBuffers& buffers, const DecodeShape& shape, Stream stream) {
  if (!can_decode(layout, groups, buffers, shape)) return cudaErrorInvalidValue;
  const auto& [num_tokens, top_k, num_experts, shared_bytes] = shape;
  const DecodeRunners first = runners(layout.gate_up), second = runners(layout.down);
  if (first.gate_up == nullptr || second.down == nullptr) return cudaErrorInvalidValue;
  if (int error =
          first.gate_up(layout, groups, buffers, num_tokens, top_k, num_experts, shared_bytes, stream))
    return error;
  return second.down(layout, groups, buffers, num_tokens, top_k, num_experts, shared_bytes, stream);
}

int launch_combine(const CombinedLayer& layer, Stream stream) {
  if (!can_combine(layer)) return cudaErrorInvalidValue;
  const int64_t elements = int64_t(layer.num_tokens) * layer.hidden_size;
  const int blocks = int((elements + kCombineThreads - 1) / kCombineThreads);
  return launch(combine_kernel, blocks, kCombineThreads, 0, stream, layer);
}

}  // namespace twofold::cuda
