// Attention of one query per sequence over paged keys and values: each block takes 256 positions, or entries of a list of
// chosen positions, for the query heads of one KV head and leaves maximum, sum and weighted values; a second kernel joins
// the splits in order.

#include "attended_positions.h"
#include "dense_layer.h"
#include "launch_shapes.h"
#include "machine.cuh"
#include "number_formats.h"

namespace twofold::cuda {

namespace {

constexpr int kLanesOfToken = 8;

// Results of split s of (sequence, head): largest score, sum of weights, then kHeadDim weighted values.
__device__ inline float* partial(float* workspace, int64_t row, int split, int splits, int head_dim) {
  return workspace + (row * splits + split) * (head_dim + 2);
}

template <int kHeadDim>
struct SplitShared {
  float q[kAttentionHeads][kHeadDim];
  float scores[kAttentionHeads][kAttentionChunk];
  float largest[kAttentionHeads], total[kAttentionHeads], fade[kAttentionHeads];
};
// Offsets in the cache of the keys and values of a chunk of a list.
struct ChunkOffsets {
  int64_t of[kAttentionChunk];
};

// kBends: whether the scores' rule may not be linear; registers that its formula takes would cost other models occupancy.
template <int kHeadDim, bool kBends, bool kChosen>
__global__ void __launch_bounds__(kHeadDim, 512 / kHeadDim)
    attention_split_kernel(DecodeAttention attention, KvPages pages, float* workspace, int splits) {
  constexpr int kWarps = kHeadDim / kWarpSize;
  constexpr int kTokensAtOnce = kWarps * (kWarpSize / kLanesOfToken);
  constexpr int kElements = kHeadDim / kLanesOfToken;
  auto& [q, scores, largest, total, fade] = static_shared<SplitShared<kHeadDim>>();
  const int sequence = blockIdx.z;
  const HeadRange heads = head_range(blockIdx.y, attention.num_heads, pages.num_kv_heads);
  const auto [begin, length, list] =
      attended<kChosen>(attention.chosen, attention.select, sequence, attention.seq_lens[sequence],
                        heads.first, attention.num_heads);
  const SplitRange range = split_range(blockIdx.x, length, begin);
  if (range.begin >= range.end) return;
  const int thread = threadIdx.x, lane = thread % kLanesOfToken;
  const uint16_t* queries = static_cast<const uint16_t*>(attention.q) +
                            (int64_t(sequence) * attention.num_heads + heads.first) * kHeadDim;
  for (int g = 0; g < heads.count; ++g)
    q[g][thread] = float_of_bits(uint32_t(queries[g * kHeadDim + thread]) << 16) * attention.rule.scale;
  if (thread < kAttentionHeads) {
    largest[thread] = -INFINITY;
    total[thread] = 0;
  }
  float values[kAttentionHeads] = {};
  const int32_t* table = attention.page_tables + int64_t(sequence) * attention.max_pages;
  const int64_t row = int64_t(pages.num_kv_heads) * kHeadDim;
  const auto offset_of = [&](int position) {
    const int64_t place =
        int64_t(table[position / pages.page_size]) * pages.page_size + position % pages.page_size;
    return place * row + heads.kv_head * kHeadDim;
  };
  const auto offset = [&](int i) {  // i: a position, or an entry of this chunk
    if constexpr (kChosen)
      return static_shared<ChunkOffsets>().of[(i - range.begin) % kAttentionChunk];
    else
      return offset_of(i);
  };
  __syncthreads();
  for (int first = range.begin; first < range.end; first += kAttentionChunk) {
    const int count = min(kAttentionChunk, range.end - first);
    if constexpr (kChosen) {
      for (int i = thread; i < count; i += kHeadDim)
        static_shared<ChunkOffsets>().of[i] = offset_of(list[first + i]);
      __syncthreads();
    }
    for (int i = thread / kLanesOfToken; i < kAttentionChunk; i += kTokensAtOnce) {
      if (i >= count) break;  // all eight lanes of a position together
      const uint4* key = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(pages.keys) +
                                                        offset(first + i) + lane * kElements);
      float k[kElements];
#pragma unroll
      for (int j = 0; j < kElements / 8; ++j) {
        const uint4 words = key[j];
        const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          k[8 * j + 2 * n] = bf16_low(w[n]);
          k[8 * j + 2 * n + 1] = bf16_high(w[n]);
        }
      }
      const uint32_t together = 0xffu << (thread % kWarpSize / kLanesOfToken * kLanesOfToken);
      for (int g = 0; g < heads.count; ++g) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kElements; ++j) sum = fused(q[g][lane * kElements + j], k[j], sum);
#pragma unroll
        for (int step = kLanesOfToken / 2; step > 0; step /= 2) sum += __shfl_xor_sync(together, sum, step);
        if (lane == 0) scores[g][i] = sum;
      }
    }
    __syncthreads();
    for (int g = thread / kWarpSize; g < heads.count; g += kWarps) {
      const int at = thread % kWarpSize;
      if constexpr (kBends) {
        for (int i = at; i < count; i += kWarpSize) scores[g][i] = attention.rule.of(scores[g][i]);
      }
      float most = largest[g];
      for (int i = at; i < count; i += kWarpSize) most = fmaxf(most, scores[g][i]);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
      float sum = 0;
      for (int i = at; i < count; i += kWarpSize) {
        const float weight = __expf(scores[g][i] - most);
        scores[g][i] = weight;
        sum += weight;
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      __syncwarp();  // all lanes have read largest[g]; shuffles order no memory
      if (at == 0) {
        fade[g] = __expf(largest[g] - most);
        total[g] = total[g] * fade[g] + sum;
        largest[g] = most;
      }
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < kAttentionHeads; ++g) {
      if (g < heads.count) values[g] *= fade[g];
    }
    for (int i = 0; i < count; ++i) {
      const uint16_t* value = static_cast<const uint16_t*>(pages.values) + offset(first + i);
      const float v = float_of_bits(uint32_t(value[thread]) << 16);
#pragma unroll
      for (int g = 0; g < kAttentionHeads; ++g) {
        if (g < heads.count) values[g] = fused(scores[g][i], v, values[g]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int g = 0; g < kAttentionHeads; ++g) {
    if (g >= heads.count) continue;
    float* out = partial(workspace, int64_t(sequence) * attention.num_heads + heads.first + g, blockIdx.x,
                         splits, kHeadDim);
    if (thread == 0) {
      out[0] = largest[g];
      out[1] = total[g];
    }
    out[2 + thread] = values[g];
  }
}

template <int kHeadDim, bool kChosen>
__global__ void __launch_bounds__(kHeadDim)
    attention_join_kernel(DecodeAttention attention, float* workspace, int splits, uint16_t* out) {
  const int sequence = blockIdx.y, head = blockIdx.x, thread = threadIdx.x;
  const int64_t row = int64_t(sequence) * attention.num_heads + head;
  const auto [first, length, list] = attended<kChosen>(
      attention.chosen, attention.select, sequence, attention.seq_lens[sequence], head, attention.num_heads);
  float most = attention.sinks != nullptr ? attention.sinks[head] : -INFINITY;
  for (int s = 0; s < num_splits(length); ++s) {
    const SplitRange range = split_range(s, length, first);
    if (range.begin < range.end) most = fmaxf(most, partial(workspace, row, s, splits, kHeadDim)[0]);
  }
  float total = attention.sinks != nullptr ? __expf(attention.sinks[head] - most) : 0.0f;
  float value = 0;
  for (int s = 0; s < num_splits(length); ++s) {
    const SplitRange range = split_range(s, length, first);
    if (range.begin >= range.end) continue;
    const float* part = partial(workspace, row, s, splits, kHeadDim);
    const float weight = __expf(part[0] - most);
    total = fused(part[1], weight, total);
    value = fused(part[2 + thread], weight, value);
  }
  out[row * kHeadDim + thread] = bf16_of_float(total > 0 ? value / total : 0.0f);
}

template <int kHeadDim>
int run(const DecodeAttention& attention, const KvPages& pages, float* workspace, void* out, Stream stream) {
  const bool chosen = attention.chosen.positions != nullptr;
  const int splits = num_splits(most_attended(attention.chosen, attention.max_length));
  const dim3 grid(splits, head_blocks(attention.num_heads, pages.num_kv_heads), attention.num_sequences);
  const dim3 heads(attention.num_heads, attention.num_sequences);
  uint16_t* const to = static_cast<uint16_t*>(out);
  if (chosen) {
    if (const int error = launch(attention_split_kernel<kHeadDim, true, true>, grid, kHeadDim, 0, stream,
                                 attention, pages, workspace, splits))
      return error;
    return launch(attention_join_kernel<kHeadDim, true>, heads, kHeadDim, 0, stream, attention, workspace,
                  splits, to);
  }
  const int error = attention.rule.is_linear()
                        ? launch(attention_split_kernel<kHeadDim, false, false>, grid, kHeadDim, 0, stream,
                                 attention, pages, workspace, splits)
                        : launch(attention_split_kernel<kHeadDim, true, false>, grid, kHeadDim, 0, stream,
                                 attention, pages, workspace, splits);
  if (error != 0) return error;
  return launch(attention_join_kernel<kHeadDim, false>, heads, kHeadDim, 0, stream, attention, workspace,
                splits, to);
}

}  // namespace

int64_t attention_workspace_bytes(int num_sequences, int num_heads, int head_dim, int max_length) {
  return 4 * int64_t(num_sequences) * num_heads * num_splits(max_length) * (head_dim + 2);
}

int launch_decode_attention(const DecodeAttention& attention, const KvPages& pages, float* workspace,
                            void* out, Stream stream) {
  if (attention.q == nullptr || attention.page_tables == nullptr || attention.seq_lens == nullptr ||
      workspace == nullptr || out == nullptr || attention.num_sequences < 1 || pages.num_kv_heads < 1 ||
      attention.num_heads % pages.num_kv_heads != 0 || attention.max_length < 1 || pages.page_size < 1 ||
      int64_t(attention.max_pages) * pages.page_size < attention.max_length) {
    return cudaErrorInvalidValue;
  }
  switch (pages.head_dim) {
    case 64:
      return run<64>(attention, pages, workspace, out, stream);
    case 128:
      return run<128>(attention, pages, workspace, out, stream);
    case 256:
      return run<256>(attention, pages, workspace, out, stream);
    case 512:
      return run<512>(attention, pages, workspace, out, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace twofold::cuda
