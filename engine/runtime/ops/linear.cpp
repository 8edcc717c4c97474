#include "ops/linear.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "ops/low_rank.h"

namespace twofold {
namespace {

// Activations multiplied with a chunk's panels before the next ones are read: as many as fit a second-level
// cache beside a panel.
constexpr int kMostBlockRows = 128;
constexpr int64_t kBlockBytes = 384 * 1024;
constexpr int kEncodeRows = 4;  // activations encoded by one chunk
constexpr double kChunkUs = 4.0;

}  // namespace

void for_ranges(ThreadPool& pool, int64_t num_items, int64_t grain, double total_us,
                FunctionRef<void(int64_t, int64_t)> body) {
  if (num_items == 0) return;
  if (pool.num_threads() == 1 || total_us < kForkUs) return body(0, num_items);
  // Pieces of 3 us or more, and some for every thread to steal: four each.
  const int64_t wanted = std::clamp<int64_t>(static_cast<int64_t>(total_us / 3.0), 2, 4 * pool.num_threads());
  const int64_t size = std::max(grain, (num_items + wanted * grain - 1) / (wanted * grain) * grain);
  pool.parallel_for((num_items + size - 1) / size, [&](int64_t chunk, int) {
    const int64_t first = chunk * size;
    body(first, std::min(size, num_items - first));
  });
}

void for_phases(ThreadPool& pool, std::span<const LoopPhase> phases, double total_us,
                ThreadPool::PhasesBody body) {
  if (total_us >= kForkUs) return pool.parallel_phases(phases, body);
  for (size_t p = 0; p < phases.size(); ++p) {
    for (int64_t chunk = 0; chunk < phases[p].num_chunks; ++chunk) body(static_cast<int>(p), chunk, 0);
  }
}

int64_t panels_per_chunk(double us_per_panel, double M, int64_t num_panels, int num_threads) {
  const int64_t worth = static_cast<int64_t>(kChunkUs / us_per_panel) + 1;
  // With many rows, neighbouring panels share the rows read.
  const int64_t sharing = M >= 16 ? 4 : 1;
  const int64_t fair = std::max<int64_t>(1, num_panels / (8 * static_cast<int64_t>(num_threads)));
  return std::min(fair, std::max(worth, sharing));
}

EncodedRows::EncodedRows(const kernels::KernelTable& table, std::span<const kernels::WeightFormat> formats,
                         int64_t columns)
    : table_(table), columns_(columns) {
  for (const kernels::WeightFormat format : formats) {
    const kernels::ActivationKind kind = table.formats[int(format)].activation;
    if (std::exchange(wanted_[int(kind)], true)) continue;
    stride_[int(kind)] = kernels::activation_row_stride(kind, columns);
    row_bytes_ += stride_[int(kind)];
  }
}

void EncodedRows::place(std::byte* memory, int64_t rows) {
  for (int kind = 0; kind < kernels::kNumActivationKinds; ++kind) {
    base_[kind] = memory;
    memory += rows * stride_[kind];
  }
}

void EncodedRows::encode(const InputRows& input, int64_t from, int64_t to, float* temporary) const {
  const int K = static_cast<int>(columns_);
  const float* const x = input.row(table_, from, columns_, temporary);
  for (int kind = 0; kind < kernels::kNumActivationKinds; ++kind) {
    if (wanted_[kind]) table_.encode[kind](x, K, base_[kind] + to * stride_[kind], stride_[kind], 1, 0, K, K);
  }
}

void EncodedRows::copy(int64_t from, int64_t to) const {
  for (int kind = 0; kind < kernels::kNumActivationKinds; ++kind) {
    if (!wanted_[kind]) continue;
    std::memcpy(base_[kind] + to * stride_[kind], base_[kind] + from * stride_[kind],
                static_cast<size_t>(stride_[kind]));
  }
}

void own_linear(const kernels::KernelTable& table, ThreadPool& pool, const InputRows& input, int M,
                const PackedMatrix& w, const float* bias, float* y, bool add) {
  kernels::WeightFormat formats[kernels::kNumWeightFormats];
  int num_formats = 0;
  for (const PackedMatrix::Segment& segment : w.segments()) {
    if (std::find(formats, formats + num_formats, segment.format) == formats + num_formats)
      formats[num_formats++] = segment.format;
  }
  const int64_t K = w.columns(), N = w.width();
  EncodedRows rows(table, {formats, static_cast<size_t>(num_formats)}, K);
  const int64_t temporary_bytes = (K * 4 + 63) / 64 * 64;
  std::byte* const memory =
      pool.scratch(kLinearScratch, rows.bytes(M) + temporary_bytes * pool.num_threads());
  const auto temporary_of = [&](int thread) {
    return reinterpret_cast<float*>(memory + thread * temporary_bytes);
  };
  rows.place(memory + temporary_bytes * pool.num_threads(), M);
  LowRankProduct low(w.adapters(), input.first, M, K);
  if (!low.empty()) low.place(pool.scratch_floats(kLowRankScratch, low.num_floats()));

  PanelPieces pieces;
  double total_us = 0;
  for (size_t s = 0; s < w.segments().size(); ++s) {
    const PackedMatrix::Segment& segment = w.segments()[s];
    const double us = product_us(static_cast<double>(segment.panel_bytes), 64.0 * static_cast<double>(K) * M);
    total_us += us * static_cast<double>(segment.num_panels);
    pieces.add(static_cast<int>(s), segment.num_panels,
               panels_per_chunk(us, M, segment.num_panels, pool.num_threads()), pool.num_nodes());
  }
  pieces.finish(pool.num_nodes());

  const auto multiply = [&](const PanelRange& piece) {
    const PackedMatrix::Segment& segment = w.segments()[static_cast<size_t>(piece.item)];
    const kernels::FormatKernels& kernel = table.formats[int(segment.format)];
    alignas(64) float tile[kMostBlockRows * kernels::kPanelRows];
    const int64_t stride = rows.stride(kernel.activation);
    const int block =
        static_cast<int>(std::clamp<int64_t>(kBlockBytes / stride / 16 * 16, 16, kMostBlockRows));
    for (int first = 0; first < M; first += block) {
      const int count = std::min(block, M - first);
      const std::byte* x = rows.row(kernel.activation, first);
      for (int64_t p = piece.first; p < piece.first + piece.count; ++p) {
        const int64_t column = segment.first_row + p * kernels::kPanelRows;
        const int n =
            static_cast<int>(std::min<int64_t>(kernels::kPanelRows, segment.rows - p * kernels::kPanelRows));
        float* to = y + first * N + column;
        if (bias == nullptr && !add) {
          kernel.matmul(x, stride, segment.panel(p), to, N, count, n, static_cast<int>(K));
          for (int m = 0; !low.empty() && m < count; ++m) low.up(table, first + m, column, n, to + m * N);
          continue;
        }
        kernel.matmul(x, stride, segment.panel(p), tile, kernels::kPanelRows, count, n, static_cast<int>(K));
        for (int m = 0; m < count; ++m, to += N) {
          float* sum = tile + m * kernels::kPanelRows;
          if (bias != nullptr) {
            for (int i = 0; i < n; ++i) sum[i] += bias[column + i];
          }
          low.up(table, first + m, column, n, sum);
          for (int i = 0; i < n; ++i) to[i] = add ? to[i] + sum[i] : sum[i];
        }
      }
    }
  };

  const bool encode_first = M <= 2;  // not worth a phase of its own
  for (int m = 0; encode_first && m < M; ++m) rows.encode(input, m, m, temporary_of(0));
  const int64_t num_encodes = encode_first ? 0 : (M + kEncodeRows - 1) / kEncodeRows;
  const int64_t num_inputs = num_encodes + low.num_chunks();
  Countdown ready;
  ready.start(static_cast<int>(num_inputs));
  const LoopPhase phases[] = {{num_inputs}, pieces.phase()};
  for_phases(pool, phases, total_us, [&](int phase, int64_t chunk, int thread) {
    if (phase == 0) {
      const int64_t end = std::min<int64_t>((chunk + 1) * kEncodeRows, M);
      if (chunk >= num_encodes) low.down(table, input, chunk - num_encodes, temporary_of(thread));
      for (int64_t m = chunk * kEncodeRows; chunk < num_encodes && m < end; ++m)
        rows.encode(input, m, m, temporary_of(thread));
      ready.done();
      return;
    }
    ready.wait(pool);
    multiply(pieces[chunk]);
  });
}

namespace {

// Adds what another rank computed of a product to its columns of y, and there what `low` has of this rank's adapters.
void add_received(const kernels::KernelTable& table, const Product& product, const LowRankProduct& low,
                  int from, int M, float*& received) {
  const int64_t N = product.w.rows();
  const auto ranges = product.w.rows_of(from);
  for (int m = 0; m < M; ++m) {
    for (const PackedMatrix::RowRange& range : ranges) {
      float* const to = product.y + m * N + range.first;
      if (product.bias != nullptr) {
        for (int64_t i = 0; i < range.count; ++i) received[i] += product.bias[range.first + i];
      }
      low.up(table, m, range.first, range.count, received);
      for (int64_t i = 0; i < range.count; ++i) to[i] = product.add ? to[i] + received[i] : received[i];
      received += range.count;
    }
  }
}

// All of an adapted product's A x, computed on this thread: `memory` keeps the results.
LowRankProduct all_low_rank(const kernels::KernelTable& table, const PackedMatrix& w, const InputRows& input,
                            int M, std::vector<float>& memory) {
  LowRankProduct low(w.adapters(), input.first, M, w.columns());
  memory.resize(static_cast<size_t>(low.num_floats()));
  low.place(memory.data());
  for (int64_t chunk = 0; chunk < low.num_chunks(); ++chunk) low.down(table, input, chunk, nullptr);
  return low;
}

}  // namespace

void linear_over_ranks(const kernels::KernelTable& table, ThreadPool& pool, const InputRows& input, int M,
                       std::span<const Product> products) {
  Ranks& ranks = *products.front().w.ranks();
  const int64_t K = products.front().w.columns();
  std::vector<float> rows;  // as the other ranks get them: normed and adjacent
  const float* x = input.x;
  if (input.norm != nullptr || input.ld != K) {
    rows.resize(static_cast<size_t>(M * K));
    for (int64_t m = 0; m < M; ++m) {
      float* const row = rows.data() + m * K;
      const float* const from = input.row(table, m, K, row);
      if (from != row) std::copy_n(from, K, row);
    }
    x = rows.data();
  }
  std::vector<int32_t> job{static_cast<int32_t>(RankJob::kLinear), M};
  for (const Product& product : products) job.push_back(product.w.number());
  const auto turn = ranks.lock();
  for (int to = 1; to < ranks.size(); ++to) ranks.send_job(to, job, {x, static_cast<size_t>(M * K)});
  for (const Product& product : products)
    own_linear(table, pool, {.x = x, .ld = K, .first = input.first}, M, product.w, product.bias, product.y,
               product.add);
  std::vector<std::vector<float>> memory(products.size());
  std::vector<LowRankProduct> low;
  for (size_t p = 0; p < products.size(); ++p)
    low.push_back(all_low_rank(table, products[p].w, {.x = x, .ld = K, .first = input.first}, M, memory[p]));
  for (int from = 1; from < ranks.size(); ++from) {
    int64_t width = 0;
    for (const Product& product : products) width += product.w.width_of(from);
    const auto received = ranks.buffer(M * width);
    ranks.receive(from, received);
    float* next = received.data();
    for (size_t p = 0; p < products.size(); ++p) add_received(table, products[p], low[p], from, M, next);
  }
}

void linear(const kernels::KernelTable& table, ThreadPool& pool, const InputRows& input, int M,
            const PackedMatrix& w, const float* bias, float* y, bool add) {
  if (w.ranks() == nullptr) return own_linear(table, pool, input, M, w, bias, y, add);
  const Product product{w, bias, y, add};
  linear_over_ranks(table, pool, input, M, {&product, 1});
}

void norm_rows(const kernels::KernelTable& table, ThreadPool& pool, const float* x, const float* weight,
               float eps, float* out, int M, int n) {
  const double us = work_us(8.0 * M * n, 4.0 * M * n);
  for_ranges(pool, M, 1, us, [&](int64_t first, int64_t count) {
    for (int64_t m = first; m < first + count; ++m) table.rmsnorm(x + m * n, weight, eps, out + m * n, n);
  });
}

}  // namespace twofold
