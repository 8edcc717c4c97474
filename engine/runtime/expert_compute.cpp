#include "expert_compute.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace twofold {

namespace {

// Weight bytes of one chunk: small enough that a busy neighbour costs its share only, large enough to
// amortise taking it.
constexpr int64_t kChunkBytes = 48 * 1024;
constexpr int kRowMultiple = 16;  // chunks end on the kernels' register tiles
// With several tokens per expert a chunk's activations are packed once for all its rows: with only 16 rows
// that alone cost about 10 % of a prefill.
constexpr int kBatchedRows = 64;

// Splits the rows of every group's matrix into chunks of about kChunkBytes; chunk c is rows of group c /
// per_group.
struct RowChunks {
  int rows_per_chunk;
  int per_group;

  RowChunks(int rows, int64_t row_bytes, bool batched) {
    const int64_t wanted = std::max<int64_t>(kChunkBytes / row_bytes, batched ? kBatchedRows : 1);
    rows_per_chunk = int((wanted + kRowMultiple - 1) / kRowMultiple * kRowMultiple);
    per_group = (rows + rows_per_chunk - 1) / rows_per_chunk;
  }
};

}  // namespace

void ExpertGroups::assign(const LayerRouting& routing, int num_experts) {
  const int num_pairs = routing.num_tokens * routing.top_k;
  counts_.assign(size_t(num_experts), 0);
  for (int p = 0; p < num_pairs; ++p) {
    const int expert = routing.ids[p];
    if (expert < 0 || expert >= num_experts) {
      throw std::out_of_range("routed to expert " + std::to_string(expert) + " of " +
                              std::to_string(num_experts));
    }
    ++counts_[size_t(expert)];
  }
  experts.clear();
  begin.assign(1, 0);
  for (int e = 0; e < num_experts; ++e) {
    if (counts_[size_t(e)] == 0) continue;
    experts.push_back(e);
    begin.push_back(begin.back() + counts_[size_t(e)]);
    counts_[size_t(e)] = begin[begin.size() - 2];  // from here on: where the expert's next pair goes
  }
  pairs.resize(size_t(num_pairs));
  for (int p = 0; p < num_pairs; ++p) pairs[size_t(counts_[size_t(routing.ids[p])]++)] = p;
}

void ExpertCompute::run(const LayerRouting& routing, const ExpertGroups& groups,
                        std::span<const std::byte* const> group_weights, const float* normed, float* hidden) {
  const auto& table = kernels::kernel_table();
  const int width = shape_.hidden;
  const int rows = shape_.intermediate;
  const bool bf16 = shape_.dtype == kernels::DType::kBF16;
  const size_t num_pairs = groups.pairs.size();
  const int64_t element = int64_t(shape_.element_bytes());
  intermediate_.resize(num_pairs * size_t(rows));
  outputs_.resize(num_pairs * size_t(width));
  position_of_.resize(num_pairs);
  for (size_t i = 0; i < num_pairs; ++i) position_of_[size_t(groups.pairs[i])] = int(i);

  // One token needs no gathering: every expert reads the same row.
  const bool one_token = routing.num_tokens == 1;
  if (!one_token) {
    gathered_.resize(num_pairs * size_t(width));
    team_.parallel_for(int64_t(groups.size()), [&](int64_t g, int) {
      for (int i = groups.begin[size_t(g)]; i < groups.begin[size_t(g) + 1]; ++i) {
        std::memcpy(gathered_.data() + size_t(i) * size_t(width),
                    normed + size_t(groups.pairs[size_t(i)] / routing.top_k) * size_t(width),
                    size_t(width) * 4);
      }
    });
  }

  const bool batched = num_pairs >= 4 * size_t(groups.size());
  const RowChunks up_chunks(rows, 2 * width * element, batched);
  team_.parallel_for(int64_t(groups.size()) * up_chunks.per_group, [&](int64_t chunk, int) {
    const size_t g = size_t(chunk / up_chunks.per_group);
    const int row = int(chunk % up_chunks.per_group) * up_chunks.rows_per_chunk;
    const int count = std::min(up_chunks.rows_per_chunk, rows - row);
    const ExpertView expert{group_weights[g], shape_.matrix_bytes()};
    const size_t first = size_t(groups.begin[g]);
    const float* x = one_token ? normed : gathered_.data() + first * size_t(width);
    float* h = intermediate_.data() + first * size_t(rows) + row;
    const std::byte* gate = expert.gate() + row * width * element;
    const std::byte* up = expert.up() + row * width * element;
    if (bf16) {
      table.gate_up_bf16(x, width, reinterpret_cast<const uint16_t*>(gate),
                         reinterpret_cast<const uint16_t*>(up), h, rows, groups.load(int(g)), count, width);
    } else {
      table.gate_up_f32(x, width, reinterpret_cast<const float*>(gate), reinterpret_cast<const float*>(up), h,
                        rows, groups.load(int(g)), count, width);
    }
  });

  const RowChunks down_chunks(width, rows * element, batched);
  team_.parallel_for(int64_t(groups.size()) * down_chunks.per_group, [&](int64_t chunk, int) {
    const size_t g = size_t(chunk / down_chunks.per_group);
    const int row = int(chunk % down_chunks.per_group) * down_chunks.rows_per_chunk;
    const int count = std::min(down_chunks.rows_per_chunk, width - row);
    const ExpertView expert{group_weights[g], shape_.matrix_bytes()};
    const size_t first = size_t(groups.begin[g]);
    const float* h = intermediate_.data() + first * size_t(rows);
    float* y = outputs_.data() + first * size_t(width) + row;
    const std::byte* down = expert.down() + row * rows * element;
    if (bf16) {
      table.matmul_bf16(h, rows, reinterpret_cast<const uint16_t*>(down), y, width, groups.load(int(g)),
                        count, rows);
    } else {
      table.matmul_f32(h, rows, reinterpret_cast<const float*>(down), y, width, groups.load(int(g)), count,
                       rows);
    }
  });

  // Rank order, not group order: the sum must not depend on which experts other tokens were routed to.
  const auto combine = [&](int64_t t) {
    float* out = hidden + size_t(t) * size_t(width);
    for (int k = 0; k < routing.top_k; ++k) {
      const size_t pair = size_t(t) * size_t(routing.top_k) + size_t(k);
      const float weight = routing.weights[pair];
      const float* y = outputs_.data() + size_t(position_of_[pair]) * size_t(width);
      for (int i = 0; i < width; ++i) out[i] += weight * y[i];
    }
  };
  constexpr int64_t kTokensPerChunk = 16;
  const int64_t num_chunks = (routing.num_tokens + kTokensPerChunk - 1) / kTokensPerChunk;
  team_.parallel_for(num_chunks, [&](int64_t chunk, int) {
    const int64_t end = std::min<int64_t>((chunk + 1) * kTokensPerChunk, routing.num_tokens);
    for (int64_t t = chunk * kTokensPerChunk; t < end; ++t) combine(t);
  });
}

}  // namespace twofold
