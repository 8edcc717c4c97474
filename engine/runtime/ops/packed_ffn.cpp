#include "ops/packed_ffn.h"

#include <algorithm>
#include <cstring>

#include "ops/ffn_adapters.h"

namespace twofold {
namespace {

constexpr int kPanelRows = kernels::kPanelRows;
constexpr int kBlockRows = 64;    // of activations, which share the nearest caches with their results
constexpr int kTilePanels = 256;  // size of a tile of gate or up: panels times activation rows
constexpr int kEncodeTokens = 4;
constexpr int kAddTokens = 4, kAddColumns = 512;  // that one chunk adds up
// Size of a piece: long stretches of memory, because every change of stream costs the time of about 20 KiB. A
// remainder at the end of gate and up is no loss, as down begins with the groups that are ready.
constexpr int64_t kMostPairs = 24, kMostDownPanels = 32;
constexpr int kGroupsPerThread = 4;
constexpr double kMostGroupUs = 100;  // longest group that is not cut
constexpr int kEncodeRows = 8;        // rows of gate and up results that a phase encodes at once
constexpr int kInputScratch = 0, kInnerScratch = 1, kOutputScratch = 2,
              kGatedScratch = 3;  // scratch slots of the pool

int64_t panels_of(int rows) { return kernels::num_panels(rows); }

// Floats from one row of results to the next: an odd number of cache lines, as activation_row_stride.
int64_t output_stride(int columns) { return (panels_of(columns) * kPanelRows) | 16; }

// x to the nearest bf16, in place.
void round_to_bf16(const kernels::KernelTable& table, float* x, int n) {
  constexpr int kAtOnce = 8 * kPanelRows;
  uint16_t rounded[kAtOnce];
  for (int first = 0; first < n; first += kAtOnce) {
    const int count = std::min(kAtOnce, n - first);
    table.f32_to_bf16(x + first, rounded, count);
    table.bf16_to_f32(rounded, x + first, count);
  }
}

// One bias for each of n columns, in every one of m rows.
void add_bias(const kernels::KernelTable& table, const float* bias, float* rows, int64_t stride, int m,
              int n) {
  for (int i = 0; bias != nullptr && i < m; ++i) table.axpy(1.0f, bias, rows + i * stride, n);
}

}  // namespace

// One run: what the phases share.
struct PackedFfn::Step {
  std::span<const FfnFormats> formats;  // see formats_
  const FfnRows& rows;
  const InputRows& input;
  const FfnAdapters& adapters;
  float* sum;
  EncodedRows inputs;  // in group order; with one token its one row
  EncodedRows inner;   // results of gate and up, in group order
  float* outputs;      // of down, in group order
  int64_t output_stride;
  float*
      gated;  // the same before it is encoded, in group order, of groups that are finished by rows; null: nowhere
  int64_t gated_stride;
  bool one_token;
  Countdown encoded;
  Countdown* gated_left;  // pieces of gate and up of a group that is finished by rows
  Countdown* group_left;  // chunks that finish its rows, or pieces of another group: what down waits for
  Countdown multiplied;

  const FfnFormats& of(int group) const { return formats[formats.size() == 1 ? 0 : size_t(group)]; }

  int num_groups() const { return static_cast<int>(rows.groups.size()); }
  int num_rows() const { return rows.begin.back(); }
  int load(int group) const { return rows.begin[size_t(group) + 1] - rows.begin[size_t(group)]; }
};

// Whether a group's rows get a phase of their own between the two products.
bool PackedFfn::finishes_rows(const Step& step, int group) const {
  return encodes_whole_rows(step.of(group)) || step.adapters.any(group);
}

// Pieces depend only on the step's shape, which decode repeats.
void PackedFfn::plan(const FfnRows& rows, bool adapted) {
  const int num_groups = static_cast<int>(rows.groups.size());
  const int num_rows = rows.begin.back();
  if (num_groups == 0) return;
  if (num_groups == planned_groups_ && num_rows == planned_rows_ && adapted == planned_adapted_ &&
      formats_ == planned_formats_)
    return;
  planned_adapted_ = adapted;
  planned_groups_ = num_groups;
  planned_rows_ = num_rows;
  planned_formats_ = formats_;
  const double load = static_cast<double>(num_rows) / num_groups;
  const auto us_of = [&](kernels::WeightFormat format, int columns) {
    return product_us(static_cast<double>(kernels::panel_bytes(format, columns)),
                      2.0 * kPanelRows * columns * load);
  };
  double pair_us = 0, down_us = 0;  // time of a panel, mean over the formats
  bool whole_rows = false;
  for (const FfnFormats& each : formats_) {
    pair_us += us_of(each.gate, hidden_) + us_of(each.up, hidden_);
    down_us += us_of(each.down, intermediate_);
    whole_rows = whole_rows || encodes_whole_rows(each);
  }
  pair_us /= static_cast<double>(formats_.size());
  down_us /= static_cast<double>(formats_.size());
  const int threads = pool_.num_threads(), nodes = pool_.num_nodes();
  const int64_t inner_panels = panels_of(intermediate_), outer_panels = panels_of(hidden_);
  // Chunks per thread: the chunks of one group are waited for together, those of many groups are not.
  const int64_t chunks = num_groups >= 4 * threads ? 4 * threads : 8 * threads;
  const int64_t most_pairs = std::clamp<int64_t>(inner_panels * num_groups / chunks, 1, kMostPairs);
  const int64_t most_down =
      std::clamp<int64_t>(outer_panels * num_groups / (8 * threads), 1, kMostDownPanels);
  const double total =
      pair_us * static_cast<double>(inner_panels) + down_us * static_cast<double>(outer_panels);
  // Many small groups: one thread computes all three matrices of a group, which are adjacent in memory (16
  // tokens of 256 x 64: 6 to 8 % less). Few tokens, so that no group can be much heavier than the others.
  const bool by_group = nodes == 1 && rows.num_tokens <= kBlockRows / 2 &&
                        num_groups >= kGroupsPerThread * threads && total < kMostGroupUs && !whole_rows &&
                        !adapted;
  gate_up_pieces_.clear();
  down_pieces_.clear();
  for (int g = 0; g < num_groups; ++g) {
    gate_up_pieces_.add(g, inner_panels, by_group ? inner_panels : most_pairs, nodes);
    if (!by_group) down_pieces_.add(g, outer_panels, most_down, nodes);
  }
  gate_up_pieces_.finish(nodes);
  down_pieces_.finish(nodes);
  total_us_ = num_groups *
              (pair_us * static_cast<double>(inner_panels) + down_us * static_cast<double>(outer_panels));
}

void PackedFfn::run(std::span<const FfnFormats> packed, const FfnRows& rows, const InputRows& input,
                    float* sum) {
  if (rows.groups.empty() && rows.elsewhere.empty()) return;
  const auto lock = pool_.lock_scratch();
  formats_.assign(packed.begin(), packed.end());
  bool whole_rows = false;
  of_inputs_.clear();
  of_inner_.clear();
  for (FfnFormats& each : formats_) {
    for (kernels::WeightFormat* format : {&each.gate, &each.up, &each.down})
      *format = kernels::multiplied_as(*format, rounding_);
    of_inputs_.insert(of_inputs_.end(), {each.gate, each.up});
    of_inner_.push_back(each.down);
    whole_rows = whole_rows || encodes_whole_rows(each);
  }
  const FfnAdapters adapters(pool_, rows);
  plan(rows, !adapters.empty());
  Step step{.formats = formats_,
            .rows = rows,
            .input = input,
            .adapters = adapters,
            .sum = sum,
            .inputs = EncodedRows(table_, of_inputs_, hidden_),
            .inner = EncodedRows(table_, of_inner_, intermediate_),
            .outputs = nullptr,
            .output_stride = output_stride(hidden_),
            .gated = nullptr,
            .gated_stride = output_stride(intermediate_),
            .one_token = rows.num_tokens == 1,
            .encoded = {},
            .gated_left = nullptr,
            .group_left = nullptr,
            .multiplied = {}};
  const int num_rows = step.num_rows(), num_elsewhere = static_cast<int>(rows.elsewhere.size());
  const int64_t input_rows = step.one_token ? 1 : num_rows;
  const int64_t temporary_bytes = (int64_t{hidden_} * 4 + 63) / 64 * 64 * pool_.num_threads();
  std::byte* const memory = pool_.scratch(kInputScratch, step.inputs.bytes(input_rows) + temporary_bytes);
  step.inputs.place(memory + temporary_bytes, input_rows);
  step.inner.place(pool_.scratch(kInnerScratch, step.inner.bytes(num_rows)), num_rows);
  step.outputs = pool_.scratch_floats(kOutputScratch, step.output_stride * (num_rows + num_elsewhere));
  row_of_.assign(size_t(rows.num_tokens) * size_t(rows.top_k), -1);
  for (int r = 0; r < num_rows; ++r) row_of_[size_t(rows.pairs[size_t(r)])] = r;
  for (int r = 0; r < num_elsewhere; ++r) row_of_[size_t(rows.elsewhere[size_t(r)])] = num_rows + r;

  if (group_capacity_ < step.num_groups()) {
    group_capacity_ = step.num_groups();
    gated_left_ = std::make_unique<Countdown[]>(size_t(group_capacity_));
    group_left_ = std::make_unique<Countdown[]>(size_t(group_capacity_));
  }
  step.group_left = group_left_.get();
  step.gated_left = gated_left_.get();
  for (int g = 0; g < step.num_groups(); ++g) {
    step.gated_left[g].start(0);
    const int begin = rows.begin[size_t(g)], end = rows.begin[size_t(g) + 1];
    const bool waits = finishes_rows(step, g) && begin < end;
    step.group_left[g].start(waits ? (end - 1) / kEncodeRows - begin / kEncodeRows + 1 : 0);
  }
  for (int64_t c = 0; c < gate_up_pieces_.size(); ++c) {
    const int g = gate_up_pieces_[c].item;
    (finishes_rows(step, g) ? step.gated_left : step.group_left)[g].add(1);
  }
  const bool finishes = whole_rows || !adapters.empty();
  const int64_t num_inner = finishes ? (num_rows + kEncodeRows - 1) / kEncodeRows : 0;
  if (finishes) step.gated = pool_.scratch_floats(kGatedScratch, step.gated_stride * num_rows);
  const bool by_group = down_pieces_.size() == 0;
  step.multiplied.start(static_cast<int>(by_group ? gate_up_pieces_.size() : down_pieces_.size()));

  const auto temporary_of = [&](int thread) {
    return reinterpret_cast<float*>(memory + thread * (temporary_bytes / pool_.num_threads()));
  };
  const bool encode_first = rows.num_tokens <= 2;  // not worth a phase of its own
  const int64_t num_encodes = encode_first ? 0 : (rows.num_tokens + kEncodeTokens - 1) / kEncodeTokens;
  if (encode_first) encode_tokens(step, 0, rows.num_tokens, temporary_of(0));
  const int64_t num_inputs = num_encodes + adapters.num_rows();
  step.encoded.start(static_cast<int>(num_inputs));
  const int64_t num_adds =
      ((rows.num_tokens + kAddTokens - 1) / kAddTokens) * ((hidden_ + kAddColumns - 1) / kAddColumns);
  const LoopPhase phases[] = {
      {num_inputs}, gate_up_pieces_.phase(), {num_inner}, down_pieces_.phase(), {num_adds}};
  const auto run_phase = [&](int phase, int64_t chunk, int thread) {
    if (phase == 0 && chunk >= num_encodes) {
      read_input(step, static_cast<int>(chunk - num_encodes), temporary_of(thread));
      step.encoded.done();
    } else if (phase == 0) {
      encode_tokens(step, chunk * kEncodeTokens,
                    std::min<int64_t>((chunk + 1) * kEncodeTokens, rows.num_tokens), temporary_of(thread));
      step.encoded.done();
    } else if (phase == 1) {
      gate_and_up(step, gate_up_pieces_[chunk]);
      if (by_group) down(step, {gate_up_pieces_[chunk].item, 0, panels_of(hidden_)});
    } else if (phase == 2) {
      finish_inner(step, chunk);
    } else if (phase == 3) {
      down(step, down_pieces_[chunk]);
    } else {
      add_up(step, chunk);
    }
  };
  if (rows.exchange == nullptr) return for_phases(pool_, phases, total_us_, run_phase);
  if (num_rows > 0) for_phases(pool_, {phases, 4}, total_us_, run_phase);
  (*rows.exchange)(step.outputs, step.output_stride);
  if (sum == nullptr) return;
  step.multiplied.start(0);
  const double values = static_cast<double>(rows.pairs.size() + rows.elsewhere.size()) * hidden_;
  const LoopPhase adds{num_adds};
  for_phases(pool_, {&adds, 1}, work_us(8.0 * values, 2.0 * values),
             [&](int, int64_t chunk, int) { add_up(step, chunk); });
}

// A token is encoded once, and copied to its other groups.
void PackedFfn::encode_tokens(Step& step, int64_t first, int64_t end, float* temporary) {
  if (step.one_token) return step.inputs.encode(step.input, 0, 0, temporary);
  for (int64_t t = first; t < end; ++t) {
    int encoded = -1;
    for (int k = 0; k < step.rows.top_k; ++k) {
      const int row = row_of_[size_t(t) * size_t(step.rows.top_k) + size_t(k)];
      if (row < 0 || row >= step.num_rows()) continue;  // computed elsewhere
      if (encoded < 0) {
        step.inputs.encode(step.input, t, row, temporary);
        encoded = row;
      } else {
        step.inputs.copy(encoded, row);
      }
    }
  }
}

// What the adapter of a row of gate and up takes from its input.
void PackedFfn::read_input(const Step& step, int row, float* temporary) {
  const FfnAdapters& adapters = step.adapters;
  if (!adapters.uses(row)) return;
  adapters.read_input(table_, row, step.input.row(table_, adapters.token(row), hidden_, temporary));
}

void PackedFfn::gate_and_up(Step& step, const PanelRange& piece) {
  step.encoded.wait(pool_);
  const FfnPanels& panels = step.rows.groups[size_t(piece.item)];
  const FfnFormats& formats = step.of(piece.item);
  const kernels::FormatKernels& gate = table_.formats[int(formats.gate)];
  const kernels::FormatKernels& up = table_.formats[int(formats.up)];
  const kernels::ActivationKind kind = table_.formats[int(formats.down)].activation;
  const bool coarser = kernels::inner_activation(kind, formats.down, rounding_) != kind;
  const bool whole_rows = encodes_whole_rows(formats), adapted = step.adapters.any(piece.item);
  const int64_t gate_bytes = kernels::panel_bytes(formats.gate, hidden_);
  const int64_t up_bytes = kernels::panel_bytes(formats.up, hidden_);
  const int begin = step.rows.begin[size_t(piece.item)], load = step.load(piece.item);
  const float limit = formats.limit;
  alignas(64) float gated[kTilePanels * kPanelRows];
  alignas(64) float upped[kTilePanels * kPanelRows];
  for (int block = 0; block < load; block += kBlockRows) {
    const int m = std::min(kBlockRows, load - block);
    const int64_t x = step.one_token ? 0 : begin + block;
    const int64_t most = std::min<int64_t>(kTilePanels / m, piece.count);
    for (int64_t p = 0; p < piece.count; p += most) {
      const int64_t count = std::min(most, piece.count - p), panel = piece.first + p;
      const int first = static_cast<int>(panel) * kPanelRows;
      const int width = static_cast<int>(count) * kPanelRows;
      const int n = std::min(width, intermediate_ - first);
      gate.matmul(step.inputs.row(gate.activation, x), step.inputs.stride(gate.activation),
                  panels.gate + panel * gate_bytes, gated, width, m, n, hidden_);
      up.matmul(step.inputs.row(up.activation, x), step.inputs.stride(up.activation),
                panels.up + panel * up_bytes, upped, width, m, n, hidden_);
      add_bias(table_, panels.gate_bias == nullptr ? nullptr : panels.gate_bias + first, gated, width, m, n);
      add_bias(table_, panels.up_bias == nullptr ? nullptr : panels.up_bias + first, upped, width, m, n);
      for (int i = 0; adapted && i < m; ++i) {
        const int row = begin + block + i;
        step.adapters.add(table_, FfnAdapters::kGate, row, first, n, gated + i * width);
        step.adapters.add(table_, FfnAdapters::kUp, row, first, n, upped + i * width);
      }
      if (whole_rows) {
        for (int i = 0; i < m; ++i) {
          gated_(gated + i * width, upped + i * width,
                 step.gated + (begin + block + i) * step.gated_stride + first, n, limit);
        }
        continue;
      }
      if (n == width) {
        gated_(gated, upped, gated, m * width, limit);
      } else {
        for (int i = 0; i < m; ++i) gated_(gated + i * width, upped + i * width, gated + i * width, n, limit);
      }
      for (int i = 0; adapted && i < m; ++i)  // before any rounding, as on a device
        std::copy_n(gated + i * width, n, step.gated + (begin + block + i) * step.gated_stride + first);
      for (int i = 0; coarser && i < m; ++i) round_to_bf16(table_, gated + i * width, n);
      table_.encode[int(kind)](gated, width, step.inner.writable_row(kind, begin + block),
                               step.inner.stride(kind), m, first, n, intermediate_);
    }
  }
  (whole_rows || adapted ? step.gated_left : step.group_left)[piece.item].done();
}

// Rows in group order, of one group or of several: those that are encoded as a whole or use an adapter.
void PackedFfn::finish_inner(Step& step, int64_t chunk) {
  const std::span<const int> begins = step.rows.begin;
  int row = static_cast<int>(chunk) * kEncodeRows;
  const int end = std::min(row + kEncodeRows, step.num_rows());
  for (int g = static_cast<int>(std::upper_bound(begins.begin(), begins.end(), row) - begins.begin()) - 1;
       row < end; ++g) {
    const int count = std::min(end, begins[size_t(g) + 1]) - row;
    if (count == 0) continue;
    if (!finishes_rows(step, g)) {
      row += count;
      continue;
    }
    constexpr kernels::ActivationKind kind = kernels::ActivationKind::kQ8Token;
    step.gated_left[g].wait(pool_);
    const float* const gated = step.gated + row * step.gated_stride;
    if (encodes_whole_rows(step.of(g))) {
      table_.encode[int(kind)](gated, step.gated_stride, step.inner.writable_row(kind, row),
                               step.inner.stride(kind), count, 0, intermediate_, intermediate_);
    }
    for (int i = 0; step.adapters.any(g) && i < count; ++i)
      step.adapters.read_inner(table_, row + i, gated + i * step.gated_stride);
    step.group_left[g].done();
    row += count;
  }
}

void PackedFfn::down(Step& step, const PanelRange& piece) {
  const kernels::WeightFormat format = step.of(piece.item).down;
  const kernels::FormatKernels& kernel = table_.formats[int(format)];
  const FfnPanels& group = step.rows.groups[size_t(piece.item)];
  const std::byte* panels = group.down + piece.first * kernels::panel_bytes(format, intermediate_);
  step.group_left[piece.item].wait(pool_);
  const int column = static_cast<int>(piece.first) * kPanelRows;
  const int n = std::min(static_cast<int>(piece.count) * kPanelRows, hidden_ - column);
  const int begin = step.rows.begin[size_t(piece.item)], load = step.load(piece.item);
  for (int block = 0; block < load; block += kBlockRows) {
    const int row = begin + block, m = std::min(kBlockRows, load - block);
    float* const to = step.outputs + row * step.output_stride + column;
    // All panels in one call: the kernel takes several at a time and prefetches by itself.
    kernel.matmul(step.inner.row(kernel.activation, row), step.inner.stride(kernel.activation), panels, to,
                  step.output_stride, m, n, intermediate_);
    add_bias(table_, group.down_bias == nullptr ? nullptr : group.down_bias + column, to, step.output_stride,
             m, n);
    for (int i = 0; step.adapters.any(piece.item) && i < m; ++i)
      step.adapters.add(table_, FfnAdapters::kDown, row + i, column, n, to + i * step.output_stride);
  }
  step.multiplied.done();
}

// Rank order, not group order: the sum must not depend on which experts other tokens were routed to.
void PackedFfn::add_up(const Step& step, int64_t chunk) {
  step.multiplied.wait(pool_);
  const int64_t num_ranges = (hidden_ + kAddColumns - 1) / kAddColumns;
  const int64_t column = chunk % num_ranges * kAddColumns;
  const int n = static_cast<int>(std::min<int64_t>(kAddColumns, hidden_ - column));
  const FfnRows& rows = step.rows;
  const int64_t first = chunk / num_ranges * kAddTokens;
  const int64_t end = std::min<int64_t>(first + kAddTokens, rows.num_tokens);
  for (int64_t pair = first * rows.top_k; pair < end * rows.top_k; ++pair) {
    const int row = row_of_[size_t(pair)];
    if (row < 0) continue;
    table_.axpy(rows.weights == nullptr ? 1.0f : rows.weights[pair],
                step.outputs + row * step.output_stride + column,
                step.sum + pair / rows.top_k * hidden_ + column, n);
  }
}

}  // namespace twofold
