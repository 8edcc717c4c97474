// Routing, and the steps between the projection of q, k, v and attention: a warp per token, or per
// token and head.

#include "dense_layer.h"
#include "launch_shapes.h"
#include "machine.cuh"
#include "number_formats.h"

namespace twofold::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxExpertsOfLane = 32;  // 1024 experts

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

using kernels::GroupScore;
using kernels::RouterScore;
using kernels::RouterShape;

// Experts outside the best groups can no longer be chosen. group_scores: [groups].
__device__ inline void keep_groups(float* choice, float* group_scores, int num_experts,
                                   const RouterShape& shape, int lane) {
  const int size = num_experts / shape.num_groups;
  for (int g = lane; g < shape.num_groups; g += kWarpSize) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = fmaxf(second, fminf(first, choice[e]));
      first = fmaxf(first, choice[e]);
    }
    group_scores[g] = shape.group_score == GroupScore::kTopTwoSum && size > 1 ? first + second : first;
  }
  __syncwarp();
  for (int g = lane; g < shape.num_groups; g += kWarpSize) {
    int better = 0;
    for (int other = 0; other < shape.num_groups; ++other) {
      better +=
          group_scores[other] > group_scores[g] || (group_scores[other] == group_scores[g] && other < g);
    }
    if (better < shape.top_groups) continue;
    for (int e = g * size; e < (g + 1) * size; ++e) choice[e] = shape.zero_others ? 0.0f : -INFINITY;
  }
  __syncwarp();
}

// Shared memory per warp: [experts] score, [experts] selection score, [groups] score of a group.
__global__ void __launch_bounds__(kThreads)
    route_kernel(const float* logits, const float* bias, int num_tokens, int num_experts, RouterShape shape,
                 int32_t* ids, float* weights) {
  float* shared = dynamic_shared<float>();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int token = int(blockIdx.x) * kWarps + warp;
  if (token >= num_tokens) return;
  const int top_k = shape.top_k;
  float* scores = shared + warp * (2 * num_experts + shape.num_groups);
  float* choice = scores + num_experts;
  const float* row = logits + int64_t(token) * num_experts;
  float largest = -INFINITY;
  for (int e = lane; e < num_experts; e += kWarpSize) largest = fmaxf(largest, row[e]);
  largest = warp_max(largest);
  float sum = 0;
  for (int e = lane; e < num_experts; e += kWarpSize) {
    float score = row[e];
    if (shape.score == RouterScore::kSoftmax) score = expf(score - largest);
    if (shape.score == RouterScore::kSigmoid) score = 1.0f / (1.0f + expf(-score));
    if (shape.score == RouterScore::kSqrtSoftplus)
      score = sqrtf(fmaxf(score, 0.0f) + log1pf(expf(-fabsf(score))));
    scores[e] = score;
    sum += score;
  }
  sum = warp_sum(sum);
  for (int e = lane; e < num_experts; e += kWarpSize) {
    if (shape.score == RouterScore::kSoftmax) scores[e] /= sum;
    choice[e] = scores[e] + (bias != nullptr ? bias[e] : 0.0f);
  }
  __syncwarp();
  if (shape.top_groups < shape.num_groups)
    keep_groups(choice, choice + num_experts, num_experts, shape, lane);
  float chosen = 0;
  for (int k = 0; k < top_k; ++k) {
    float best = -INFINITY;
    int at = num_experts;
    for (int e = lane; e < num_experts; e += kWarpSize) {
      if (choice[e] > best) {
        best = choice[e];
        at = e;
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, step);
      const int other_at = __shfl_xor_sync(0xffffffffu, at, step);
      if (other > best || (other == best && other_at < at)) {
        best = other;
        at = other_at;
      }
    }
    if (at >= num_experts) at = k;  // nothing but NaN: still a valid expert
    chosen += scores[at];
    if (lane == 0) {
      ids[token * top_k + k] = at;
      weights[token * top_k + k] = scores[at];
    }
    // By the lane that reads it: shuffles order no memory.
    if (lane == at % kWarpSize) choice[at] = -INFINITY;
  }
  if (lane == 0) {
    float* own = weights + token * top_k;
    if (shape.score == RouterScore::kSoftmaxOfChosen) {
      float most = -INFINITY, total = 0;
      for (int k = 0; k < top_k; ++k) most = fmaxf(most, own[k]);
      for (int k = 0; k < top_k; ++k) total += own[k] = expf(own[k] - most);
      for (int k = 0; k < top_k; ++k) own[k] /= total;
      chosen = 1.0f;
    }
    const float factor = shape.renormalise ? shape.scale / (chosen + 1e-20f) : shape.scale;
    for (int k = 0; k < top_k; ++k) own[k] *= factor;
  }
}

// Head h of a token: query heads, then key heads, then value heads. Lane holds dimensions lane + 32 j.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) rope_store_kernel(QkvRows rows, KvPages pages, uint16_t* q) {
  constexpr int kElements = kHeadDim / kWarpSize;
  const int heads = rows.num_heads + 2 * pages.num_kv_heads;
  const int item = int(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (item >= rows.num_tokens * heads) return;
  const int token = item / heads, head = item % heads, lane = threadIdx.x % kWarpSize;
  const uint16_t* in = static_cast<const uint16_t*>(rows.qkv) + (int64_t(token) * heads + head) * kHeadDim;
  const bool is_query = head < rows.num_heads;
  const bool is_value = head >= rows.num_heads + pages.num_kv_heads;
  float x[kElements];
#pragma unroll
  for (int j = 0; j < kElements; ++j) x[j] = float_of_bits(uint32_t(in[lane + 32 * j]) << 16);
  const float* norm = is_value ? rows.v_norm : is_query ? rows.q_norm : rows.k_norm;
  if (norm != nullptr) {
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kElements; ++j) squares = fused(x[j], x[j], squares);
    const float inverse = rsqrtf(warp_sum(squares) / kHeadDim + rows.epsilon);
#pragma unroll
    for (int j = 0; j < kElements; ++j) x[j] *= inverse * norm[lane + 32 * j];
  }
  if (!is_value) {
    const int half = rows.rotary / 2, reach = half / kWarpSize;  // partners lie `reach` elements apart
    float turned[kElements];
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      turned[j] = x[j];
      const int d = lane + 32 * j;
      if (d >= rows.rotary) continue;
      const bool first = d < half;
      float partner = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {  // constant indices keep x in registers
        if (i == (first ? j + reach : j - reach)) partner = x[i];
      }
      const int64_t at = int64_t(token) * half + (first ? d : d - half);
      const float cos = rows.cos[at], sin = rows.sin[at];
      turned[j] = first ? x[j] * cos - partner * sin : x[j] * cos + partner * sin;
    }
#pragma unroll
    for (int j = 0; j < kElements; ++j) x[j] = turned[j];
  }
  uint16_t* out;
  if (is_query) {
    out = q + (int64_t(token) * rows.num_heads + head) * kHeadDim;
  } else {
    const int64_t place = rows.slot_mapping[token];
    if (place < 0) return;
    const int kv_head = (head - rows.num_heads) % pages.num_kv_heads;
    uint16_t* cache = static_cast<uint16_t*>(is_value ? pages.values : pages.keys);
    out = cache + (place * pages.num_kv_heads + kv_head) * kHeadDim;
  }
#pragma unroll
  for (int j = 0; j < kElements; ++j) out[lane + 32 * j] = bf16_of_float(x[j]);
}

}  // namespace

int launch_route(const float* logits, const float* bias, int num_tokens, int num_experts,
                 const RouterShape& shape, int32_t* ids, float* weights, Stream stream) {
  const bool fits = shape.num_groups >= 1 && num_experts % shape.num_groups == 0 && shape.top_groups >= 1 &&
                    shape.top_groups <= shape.num_groups && shape.top_k >= 1 &&
                    shape.top_k <= shape.top_groups * (num_experts / shape.num_groups);
  if (logits == nullptr || ids == nullptr || weights == nullptr || num_tokens < 1 || !fits ||
      num_experts > kMaxExpertsOfLane * kWarpSize) {
    return cudaErrorInvalidValue;
  }
  const int shared = kWarps * (2 * num_experts + shape.num_groups) * 4;
  return launch(route_kernel, (num_tokens + kWarps - 1) / kWarps, kThreads, shared, stream, logits, bias,
                num_tokens, num_experts, shape, ids, weights);
}

int launch_rope_store(const QkvRows& rows, const KvPages& pages, void* q, Stream stream) {
  if (rows.qkv == nullptr || q == nullptr || pages.keys == nullptr || pages.values == nullptr ||
      rows.slot_mapping == nullptr || (rows.rotary > 0 && (rows.cos == nullptr || rows.sin == nullptr)) ||
      rows.num_tokens < 1 || rows.num_heads < 1 || pages.num_kv_heads < 1 || rows.rotary < 0 ||
      rows.rotary > pages.head_dim || rows.rotary % (2 * kWarpSize) != 0) {
    return cudaErrorInvalidValue;
  }
  const int items = rows.num_tokens * (rows.num_heads + 2 * pages.num_kv_heads);
  const int blocks = (items + kWarps - 1) / kWarps;
  uint16_t* out = static_cast<uint16_t*>(q);
  switch (pages.head_dim) {
    case 64:
      return launch(rope_store_kernel<64>, blocks, kThreads, 0, stream, rows, pages, out);
    case 128:
      return launch(rope_store_kernel<128>, blocks, kThreads, 0, stream, rows, pages, out);
    case 256:
      return launch(rope_store_kernel<256>, blocks, kThreads, 0, stream, rows, pages, out);
    case 512:
      return launch(rope_store_kernel<512>, blocks, kThreads, 0, stream, rows, pages, out);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace twofold::cuda
