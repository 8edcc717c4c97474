#include "ops/attention/mla.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "host/work_clock.h"
#include "ops/attention/blocked_attention.h"

namespace twofold {
namespace {

constexpr int kTileRows = 32;  // query rows (tokens x heads) computed together
constexpr int kFewestHeads = 4;
constexpr int64_t kQueryFloats = int64_t{1} << 24;  // query elements computed together: 64 MiB
constexpr int kMostRows = 128;                      // that one chunk of linear_by_head encodes

// Slots of the pool's scratch, beside linear()'s. The weighted latents replace the queries.
constexpr int kCompressedScratch = 1, kHeadsScratch = 2, kQueryScratch = 3, kBlocksScratch = 4;

}  // namespace

void linear_by_head(const kernels::KernelTable& table, ThreadPool& pool, const HeadRows<const float>& x,
                    int M, const PackedMatrix& w, const HeadRows<float>& y) {
  kernels::WeightFormat formats[kernels::kNumWeightFormats];
  int num_formats = 0;
  for (const PackedMatrix::Segment& segment : w.segments()) {
    if (std::find(formats, formats + num_formats, segment.format) == formats + num_formats)
      formats[num_formats++] = segment.format;
  }
  const int64_t K = w.columns();
  const EncodedRows encoder(table, {formats, static_cast<size_t>(num_formats)}, K);
  const int block = std::min(M, kMostRows);
  const int64_t ranks = w.adapters() == nullptr ? 0 : w.adapters()->max_rank();
  const int64_t temporary = (std::max(K, ranks) * 4 + 63) / 64 * 64;
  const int64_t memory = temporary + (encoder.bytes(block) + 63) / 64 * 64;
  std::byte* const scratch = pool.scratch(kLinearScratch, memory * pool.num_threads());

  PanelPieces pieces;
  double total_us = 0;
  // A chunk encodes its input rows itself, so a head's panels are shared out only when there are few heads.
  const bool by_head = static_cast<int64_t>(w.segments().size()) >= 4 * pool.num_threads();
  for (size_t h = 0; h < w.segments().size(); ++h) {
    const PackedMatrix::Segment& segment = w.segments()[h];
    total_us += product_us(static_cast<double>(segment.num_panels * segment.panel_bytes),
                           64.0 * static_cast<double>(segment.num_panels * K) * M);
    pieces.add(static_cast<int>(h), segment.num_panels, by_head ? segment.num_panels : 4, pool.num_nodes());
  }
  pieces.finish(pool.num_nodes());
  std::span<const int32_t> adapters;
  if (w.adapters() != nullptr) adapters = w.adapters()->rows().of(x.first, M);
  const LoopPhase phase = pieces.phase();
  for_phases(pool, {&phase, 1}, total_us, [&](int, int64_t chunk, int thread) {
    const PanelRange& piece = pieces[chunk];
    const PackedMatrix::Segment& segment = w.segments()[static_cast<size_t>(piece.item)];
    const kernels::FormatKernels& kernel = table.formats[int(segment.format)];
    std::byte* const own = scratch + thread * memory;
    EncodedRows rows = encoder;
    rows.place(own + temporary, block);
    const int64_t stride = rows.stride(kernel.activation);
    for (int first = 0; first < M; first += block) {
      const int count = std::min(block, M - first);
      const InputRows input{.x = x.data + piece.item * x.head + first * x.token, .ld = x.token};
      for (int m = 0; m < count; ++m) rows.encode(input, m, m, reinterpret_cast<float*>(own));
      float* to = y.data + piece.item * y.head + first * y.token;
      for (int64_t p = piece.first; p < piece.first + piece.count; ++p) {
        const int64_t row = p * kernels::kPanelRows;
        const int n = static_cast<int>(std::min<int64_t>(kernels::kPanelRows, segment.rows - row));
        kernel.matmul(rows.row(kernel.activation, 0), stride, segment.panel(p), to + row, y.token, count, n,
                      static_cast<int>(K));
      }
      const int64_t row = piece.first * kernels::kPanelRows;
      const int64_t num_rows = std::min(piece.count * kernels::kPanelRows, segment.rows - row);
      for (int m = 0; !adapters.empty() && m < count; ++m) {
        const LowRank* const low = w.adapters()->part(adapters[size_t(first + m)], segment.first_row);
        if (low == nullptr) continue;
        float* const t = reinterpret_cast<float*>(own);
        low->down(table, input.x + m * input.ld, 0, low->rank(), t);
        low->up(table, t, segment.first_row + row, num_rows, to + m * y.token + row);
      }
    }
  });
}

MlaAttention::MlaAttention(const kernels::KernelTable& table, ThreadPool& pool, MlaParts parts)
    : table_(table), pool_(pool), parts_(std::move(parts)) {}

const StatePlane& MlaAttention::plane(const AttentionBatch& batch, const StateCache& cache, int layer) const {
  if (layer < 0 || layer >= cache.num_layers() || parts_.kv_layer >= layer) {
    throw KernelFailure("Mla.forward: layer is " + std::to_string(layer) + "; the cache has layers 0 to " +
                        std::to_string(cache.num_layers() - 1) + ", and latents are of layer " +
                        std::to_string(parts_.kv_layer));
  }
  const std::vector<StatePlane>& planes = cache.planes(parts_.has_latents() ? layer : parts_.kv_layer);
  const size_t own = cache.planes(layer).size();
  const size_t expected = size_t{parts_.has_latents()} + static_cast<size_t>(parts_.select.num_planes());
  if (own != expected || planes.empty() || planes.front().width != parts_.shape.cached()) {
    const std::string width = planes.empty() ? "0" : std::to_string(planes.front().width);
    throw KernelFailure("Mla.forward: the cache has " + std::to_string(own) + " planes, and latents of " +
                        width + " elements; expected " + std::to_string(expected) + ", and latents of " +
                        std::to_string(parts_.shape.cached()));
  }
  const Rotation& rotation = parts_.rotation;
  if (rotation.index >= batch.num_rotations()) {
    throw KernelFailure("Mla.forward: rotation is " + std::to_string(rotation.index) + "; the batch has " +
                        std::to_string(batch.num_rotations()));
  }
  if (rotation.positions && 2 * rotation.pairs(batch) != parts_.shape.rope) {
    throw KernelFailure("Mla.forward: rope_cos rotates " + std::to_string(rotation.pairs(batch)) +
                        " pairs; expected " + std::to_string(parts_.shape.rope / 2));
  }
  return planes.front();
}

void MlaAttention::forward(const float* hidden, float* sum, AttentionBatch& batch, const StateCache& cache,
                           int layer) {
  const StatePlane& plane = this->plane(batch, cache, layer);
  batch.check_pages(cache);
  const int T = batch.num_tokens();
  if (T == 0) return;
  const auto lock = pool_.lock_scratch();
  WorkTimer timer(Work::kQkv);
  float* a = pool_.scratch_floats(kCompressedScratch, T * parts_.project.rows());
  parts_.project.run(table_, pool_, hidden, hidden_size(), T, a);
  timer.next(Work::kKeysValues);
  if (parts_.has_latents()) store_latents(a, batch, plane, cache.page_size());
  timer.next(Work::kAttention);
  parts_.select.prepare({hidden, a, parts_.project.rows()}, batch, cache, layer);

  const Tiling tiling = this->tiling(batch);
  const std::vector<AttentionTile>& tiles = batch.tiles(tiling.tokens);
  const int64_t query_floats = static_cast<int64_t>(parts_.shape.num_heads) * parts_.shape.cached();
  const int64_t most = std::max<int64_t>(tiling.tokens, kQueryFloats / query_floats);
  for (size_t begin = 0; begin < tiles.size();) {
    size_t end = begin;
    int count = 0;
    while (end < tiles.size() && count + tiles[end].num_tokens <= most) count += tiles[end++].num_tokens;
    const int first = tiles[begin].first_token;
    float* queries = pool_.scratch_floats(kQueryScratch, count * query_floats);
    timer.next(Work::kQkv);
    const int64_t a_width = parts_.project.rows(), width = parts_.out.columns();
    const int64_t expanded = parts_.q_b.weight == nullptr ? 0 : parts_.q_b.rows();
    // Interleaved gates are read after the values are made; else the values take the queries' place.
    const int64_t before = parts_.interleaved_gate ? count * expanded : 0;
    float* const heads =
        pool_.scratch_floats(kHeadsScratch, std::max(before + count * width, count * expanded));
    const float* q = a + first * a_width;
    if (expanded > 0) {
      parts_.q_b.run(table_, pool_, q, a_width, count, heads, first);
      q = heads;
    }
    const int64_t q_width = expanded > 0 ? expanded : a_width;
    make_queries(q, q_width, batch, first, count, queries);
    timer.next(Work::kAttention);
    attend(queries, batch, plane, cache.page_size(), first, std::span(tiles).subspan(begin, end - begin),
           tiling);
    timer.next(Work::kOutput);
    float* const values = heads + before;
    linear_by_head(table_, pool_, {queries, query_floats, parts_.shape.cached(), first}, count, *parts_.v_b,
                   {values, width, parts_.shape.value});
    if (parts_.interleaved_gate) {
      gate(q + parts_.shape.key(), q_width, parts_.query_rows(), count, values);
    } else if (parts_.gate) {
      gate(a + (first + 1) * a_width - parts_.gate_rows(), a_width, parts_.head_gates(), count, values);
    }
    parts_.out.add(table_, pool_, values, count, sum + static_cast<int64_t>(first) * hidden_size(), first);
    begin = end;
  }
}

void MlaAttention::store_latents(const float* a, const AttentionBatch& batch, const StatePlane& plane,
                                 int page_size) {
  const int T = batch.num_tokens();
  const MlaShape& shape = parts_.shape;
  const int64_t width = parts_.project.rows();
  const double elements = static_cast<double>(T) * shape.cached();
  for_ranges(pool_, T, 1, work_us(12.0 * elements, 10.0 * elements), [&](int64_t first, int64_t count) {
    std::vector<float> row(static_cast<size_t>(shape.cached())), normed(static_cast<size_t>(shape.rope));
    for (int t = static_cast<int>(first); t < first + count; ++t) {
      const float* from = a + t * width + q_rows();
      parts_.latent_norm.apply(table_, from, row.data(), shape.latent);
      const float* key = from + shape.latent;
      if (parts_.key_norm.weight != nullptr) {
        parts_.key_norm.apply(table_, key, normed.data(), shape.rope);
        key = normed.data();
      }
      parts_.rotation.apply(table_, batch, t, key, row.data() + shape.latent, shape.rope);
      store_row(table_, row.data(), plane, batch.row(t, page_size));
    }
  });
}

MlaAttention::Tiling MlaAttention::tiling(const AttentionBatch& batch) const {
  Tiling tiling{std::max(1, kTileRows / parts_.shape.num_heads), std::min(parts_.shape.num_heads, kTileRows)};
  if (batch.num_tokens() < 2 * pool_.num_threads()) tiling.tokens = 1;
  if (tiling.tokens > 1) return tiling;
  // Positions are shared out by blocks; if there are few blocks too, heads are shared out.
  int64_t blocks = 0;
  for (int t = 0; t < batch.num_tokens(); ++t)
    blocks += (parts_.select.bound(batch.position(t)) - 1) / kBlockPositions + 1;
  while (tiling.heads > kFewestHeads &&
         blocks * parts_.shape.num_heads / tiling.heads < 2 * pool_.num_threads())
    tiling.heads = (tiling.heads + 1) / 2;
  return tiling;
}

void MlaAttention::make_queries(const float* q, int64_t width, const AttentionBatch& batch, int first,
                                int count, float* queries) {
  const MlaShape& shape = parts_.shape;
  const int heads = shape.num_heads, stride = parts_.query_rows(), cached = shape.cached();
  const int64_t query_width = static_cast<int64_t>(heads) * cached;
  linear_by_head(table_, pool_, {q, width, stride, first}, count, *parts_.k_b,
                 {queries, query_width, cached});
  const double elements = static_cast<double>(count) * heads * shape.rope;
  for_ranges(pool_, count, 1, work_us(8.0 * elements, 6.0 * elements), [&](int64_t from, int64_t n) {
    for (int64_t t = from; t < from + n; ++t) {
      const int token = first + static_cast<int>(t);
      float* query = queries + t * query_width;
      for (int h = 0; h < heads; ++h) {
        parts_.rotation.apply(table_, batch, token, q + t * width + h * stride + shape.nope,
                              query + h * cached + shape.latent, shape.rope);
        parts_.scale.apply(parts_.scale.factor(batch.position(token), h), query + h * cached, cached);
      }
    }
  });
}

void MlaAttention::gate(const float* gates, int64_t width, int64_t stride, int count, float* values) const {
  const int heads = parts_.shape.num_heads, D = parts_.shape.value;
  const double elements = static_cast<double>(count) * heads * D;
  for_ranges(pool_, count, 1, work_us(12.0 * elements, 20.0 * elements), [&](int64_t from, int64_t n) {
    for (int64_t t = from; t < from + n; ++t) {
      for (int h = 0; h < heads; ++h) {
        float* const head = values + (t * heads + h) * D;
        parts_.gate.apply(table_, gates + t * width + h * stride, head, head, D);
      }
    }
  });
}

// Tiles of tokens with all their heads, or tokens with some of them.
class MlaAttention::Source final : public AttentionSource {
 public:
  Source(const MlaAttention& block, const Tiling& tiling, const StatePlane& plane, float* queries, int first)
      : shape_(block.parts_.shape), heads_(tiling.heads), plane_(plane), queries_(queries), first_(first) {}

  int parts() const override { return (shape_.num_heads + heads_ - 1) / heads_; }
  int heads(int part) const override { return std::min(heads_, shape_.num_heads - part * heads_); }
  int first_head(int part) const override { return part * heads_; }
  const StatePlane& keys(int) const override { return plane_; }
  const StatePlane& values(int) const override { return plane_; }
  const float* queries(const AttentionTile& tile, int part, float*) const override { return at(tile, part); }
  // The shared key's columns are summed too, and ignored: rows of the cache are read in place.
  void take(const AttentionTile& tile, int part, const float* sums) const override {
    const int D = shape_.cached();
    float* to = at(tile, part);
    for (int row = 0; row < tile.num_tokens * heads(part); ++row)
      std::copy_n(sums + int64_t{row} * D, shape_.latent, to + int64_t{row} * D);
  }

 private:
  float* at(const AttentionTile& tile, int part) const {
    return queries_ +
           (int64_t{tile.first_token - first_} * shape_.num_heads + part * heads_) * shape_.cached();
  }

  const MlaShape& shape_;
  int heads_;
  const StatePlane& plane_;
  float* queries_;
  int first_;
};

void MlaAttention::attend(float* queries, const AttentionBatch& batch, const StatePlane& plane, int page_size,
                          int first, std::span<const AttentionTile> tiles, const Tiling& tiling) const {
  const BlockedAttention attention(table_, pool_, parts_.scores, parts_.select, kBlocksScratch);
  attention.run(Source(*this, tiling, plane, queries, first), batch, tiles, page_size);
}

}  // namespace twofold
