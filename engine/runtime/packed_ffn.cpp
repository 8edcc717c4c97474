#include "packed_ffn.h"

#include <algorithm>
#include <cstring>

namespace twofold {
namespace {

constexpr int kPanelRows = kernels::kPanelRows;
constexpr int kBlockRows =
    64;  // of activations: two tiles of it and what they are made of share the nearest caches
constexpr int kEncodeTokens = 4;
constexpr int kInputSlot = 0, kInnerSlot = 1, kOutputSlot = 2;  // of the team's scratch

int64_t panels_of(int rows) { return kernels::num_panels(rows); }

Countdown* at_least(std::unique_ptr<Countdown[]>& counters, int& capacity, int wanted) {
  if (capacity < wanted) {
    counters = std::make_unique<Countdown[]>(static_cast<size_t>(wanted));
    capacity = wanted;
  }
  return counters.get();
}

}  // namespace

// One run: what the phases share.
struct PackedFfn::Step {
  const FfnFormats& formats;
  const FfnRows& rows;
  const InputRows& input;
  float* sum;
  EncodedRows inputs;  // in group order; with one token its one row
  EncodedRows inner;   // silu(gate) * up, in group order
  float* outputs;      // [range of columns][row][columns of the range]
  bool one_token;
  Countdown encoded;
  Countdown* group_left;
  Countdown* range_left;

  int num_groups() const { return static_cast<int>(rows.groups.size()); }
  int num_rows() const { return rows.begin.back(); }
  int load(int group) const { return rows.begin[size_t(group) + 1] - rows.begin[size_t(group)]; }
};

// Pieces depend on the shape of the step alone, and decode repeats it.
void PackedFfn::plan(const FfnFormats& formats, const FfnRows& rows) {
  const int num_groups = static_cast<int>(rows.groups.size());
  const int num_rows = rows.begin.back();
  if (num_groups == planned_groups_ && num_rows == planned_rows_ && formats.gate == planned_formats_.gate &&
      formats.up == planned_formats_.up && formats.down == planned_formats_.down)
    return;
  planned_groups_ = num_groups;
  planned_rows_ = num_rows;
  planned_formats_ = formats;
  const double load = static_cast<double>(num_rows) / num_groups;
  const auto us_of = [&](kernels::WeightFormat format, int columns) {
    return product_us(static_cast<double>(kernels::panel_bytes(format, columns)),
                      2.0 * kPanelRows * columns * load);
  };
  const int threads = team_.num_threads(), nodes = team_.num_nodes();
  const double pair_us = us_of(formats.gate, hidden_) + us_of(formats.up, hidden_);
  const int64_t inner_panels = panels_of(intermediate_), outer_panels = panels_of(hidden_);
  gate_up_pieces_.clear();
  const int64_t most_pairs = panels_per_chunk(pair_us, load, inner_panels * num_groups, threads);
  for (int g = 0; g < num_groups; ++g) gate_up_pieces_.add(g, inner_panels, most_pairs, nodes);
  gate_up_pieces_.finish(nodes);

  const double down_us = us_of(formats.down, intermediate_);
  down_ranges_.clear();
  down_ranges_.add(0, outer_panels, panels_per_chunk(down_us, load, outer_panels * num_groups, threads),
                   nodes);
  down_ranges_.finish(nodes);
  down_per_node_.assign(static_cast<size_t>(nodes), 0);
  for (int node = 0; node < nodes; ++node)
    down_per_node_[size_t(node)] = down_ranges_.phase().per_node[node] * num_groups;
  total_us_ = num_groups *
              (pair_us * static_cast<double>(inner_panels) + down_us * static_cast<double>(outer_panels));
}

void PackedFfn::run(const FfnFormats& formats, const FfnRows& rows, const InputRows& input, float* sum) {
  if (rows.groups.empty()) return;
  const auto lock = team_.lock_scratch();
  plan(formats, rows);
  const kernels::WeightFormat in[] = {formats.gate, formats.up}, out[] = {formats.down};
  Step step{.formats = formats,
            .rows = rows,
            .input = input,
            .sum = sum,
            .inputs = EncodedRows(table_, in, hidden_),
            .inner = EncodedRows(table_, out, intermediate_),
            .outputs = nullptr,
            .one_token = rows.num_tokens == 1,
            .encoded = {},
            .group_left = at_least(group_left_, group_capacity_, static_cast<int>(rows.groups.size())),
            .range_left = at_least(range_left_, range_capacity_, static_cast<int>(down_ranges_.size()))};
  const int num_rows = step.num_rows();
  const int64_t input_rows = step.one_token ? 1 : num_rows;
  const int64_t temporary_bytes = (int64_t{hidden_} * 4 + 63) / 64 * 64 * team_.num_threads();
  std::byte* const memory = team_.scratch(kInputSlot, step.inputs.bytes(input_rows) + temporary_bytes);
  step.inputs.place(memory + temporary_bytes, input_rows);
  step.inner.place(team_.scratch(kInnerSlot, step.inner.bytes(num_rows)), num_rows);
  step.outputs = team_.scratch_floats(kOutputSlot, panels_of(hidden_) * kPanelRows * num_rows);
  row_of_.assign(size_t(rows.num_tokens) * size_t(rows.top_k), -1);
  for (int r = 0; r < num_rows; ++r) row_of_[size_t(rows.pairs[size_t(r)])] = r;

  for (int g = 0; g < step.num_groups(); ++g) step.group_left[g].start(0);
  for (int64_t c = 0; c < gate_up_pieces_.size(); ++c) step.group_left[gate_up_pieces_[c].item].add(1);
  for (int64_t r = 0; r < down_ranges_.size(); ++r) step.range_left[r].start(step.num_groups());

  const auto temporary_of = [&](int thread) {
    return reinterpret_cast<float*>(memory + thread * (temporary_bytes / team_.num_threads()));
  };
  const bool encode_first = rows.num_tokens <= 2;  // not worth a phase of its own
  const int64_t num_encodes = (rows.num_tokens + kEncodeTokens - 1) / kEncodeTokens;
  if (encode_first) encode_tokens(step, 0, rows.num_tokens, temporary_of(0));
  step.encoded.start(encode_first ? 0 : static_cast<int>(num_encodes));
  const LoopPhase phases[] = {{encode_first ? 0 : num_encodes},
                              gate_up_pieces_.phase(),
                              {down_ranges_.size() * step.num_groups(), down_per_node_.data()}};
  for_phases(team_, phases, total_us_, [&](int phase, int64_t chunk, int thread) {
    if (phase == 0) {
      encode_tokens(step, chunk * kEncodeTokens,
                    std::min<int64_t>((chunk + 1) * kEncodeTokens, rows.num_tokens), temporary_of(thread));
      step.encoded.done();
    } else if (phase == 1) {
      gate_and_up(step, gate_up_pieces_[chunk]);
    } else {
      down(step, chunk);
    }
  });
}

// A token is encoded once, and copied to the other groups it belongs to.
void PackedFfn::encode_tokens(Step& step, int64_t first, int64_t end, float* temporary) {
  if (step.one_token) return step.inputs.encode(step.input, 0, 0, temporary);
  for (int64_t t = first; t < end; ++t) {
    int encoded = -1;
    for (int k = 0; k < step.rows.top_k; ++k) {
      const int row = row_of_[size_t(t) * size_t(step.rows.top_k) + size_t(k)];
      if (row < 0) continue;
      if (encoded < 0) {
        step.inputs.encode(step.input, t, row, temporary);
        encoded = row;
      } else {
        step.inputs.copy(encoded, row);
      }
    }
  }
}

void PackedFfn::gate_and_up(Step& step, const PanelRange& piece) {
  step.encoded.wait(team_);
  const FfnPanels& panels = step.rows.groups[size_t(piece.item)];
  const kernels::FormatKernels& gate = table_.formats[int(step.formats.gate)];
  const kernels::FormatKernels& up = table_.formats[int(step.formats.up)];
  const kernels::ActivationKind kind = table_.formats[int(step.formats.down)].activation;
  const int64_t gate_bytes = kernels::panel_bytes(step.formats.gate, hidden_);
  const int64_t up_bytes = kernels::panel_bytes(step.formats.up, hidden_);
  const int begin = step.rows.begin[size_t(piece.item)], load = step.load(piece.item);
  alignas(64) float gated[kBlockRows * kPanelRows];
  alignas(64) float upped[kBlockRows * kPanelRows];
  for (int block = 0; block < load; block += kBlockRows) {
    const int m = std::min(kBlockRows, load - block);
    const int64_t x = step.one_token ? 0 : begin + block;
    for (int64_t p = piece.first; p < piece.first + piece.count; ++p) {
      const int first = static_cast<int>(p) * kPanelRows;
      const int n = std::min(kPanelRows, intermediate_ - first);
      const std::byte* up_panel = panels.up + p * up_bytes;
      prefetch_ahead(up_panel);
      gate.matmul(step.inputs.row(gate.activation, x), step.inputs.stride(gate.activation),
                  panels.gate + p * gate_bytes, gated, kPanelRows, m, n, hidden_);
      if (p + 1 < piece.first + piece.count) prefetch_ahead(panels.gate + (p + 1) * gate_bytes);
      up.matmul(step.inputs.row(up.activation, x), step.inputs.stride(up.activation), up_panel, upped,
                kPanelRows, m, n, hidden_);
      if (n == kPanelRows) {
        table_.silu_mul(gated, upped, gated, m * kPanelRows);
      } else {
        for (int i = 0; i < m; ++i)
          table_.silu_mul(gated + i * kPanelRows, upped + i * kPanelRows, gated + i * kPanelRows, n);
      }
      table_.encode[int(kind)](gated, kPanelRows, step.inner.writable_row(kind, begin + block),
                               step.inner.stride(kind), m, first, n, intermediate_);
    }
  }
  step.group_left[piece.item].done();
}

void PackedFfn::down(Step& step, int64_t chunk) {
  const int64_t r = chunk / step.num_groups();
  const int g = static_cast<int>(chunk % step.num_groups());
  const PanelRange& range = down_ranges_[r];
  const kernels::FormatKernels& kernel = table_.formats[int(step.formats.down)];
  const int64_t panel_bytes = kernels::panel_bytes(step.formats.down, intermediate_);
  const std::byte* panels = step.rows.groups[size_t(g)].down + range.first * panel_bytes;
  step.group_left[g].wait(team_);
  const int64_t width = range.count * kPanelRows;
  const int num_columns = static_cast<int>(std::min<int64_t>(width, hidden_ - range.first * kPanelRows));
  float* outputs = step.outputs + range.first * kPanelRows * step.num_rows();
  const int begin = step.rows.begin[size_t(g)], load = step.load(g);
  if (g + 1 < step.num_groups())
    prefetch_ahead(step.rows.groups[size_t(g) + 1].down + range.first * panel_bytes);
  for (int block = 0; block < load; block += kBlockRows) {
    const int m = std::min(kBlockRows, load - block);
    const int row = begin + block;
    // All panels in one call: the kernel takes several at a time and looks ahead by itself.
    kernel.matmul(step.inner.row(kernel.activation, row), step.inner.stride(kernel.activation), panels,
                  outputs + row * width, width, m, num_columns, intermediate_);
  }
  if (step.range_left[r].done()) add_up(step, range);
}

// Rank order, not group order: the sum must not depend on which experts other tokens were routed to.
void PackedFfn::add_up(const Step& step, const PanelRange& range) {
  const int64_t column = range.first * kPanelRows;
  const int64_t width = range.count * kPanelRows;
  const int n = static_cast<int>(std::min<int64_t>(width, hidden_ - column));
  const float* outputs = step.outputs + column * step.num_rows();
  const FfnRows& rows = step.rows;
  for (int64_t t = 0; t < rows.num_tokens; ++t) {
    float* sum = step.sum + t * hidden_ + column;
    for (int k = 0; k < rows.top_k; ++k) {
      const int64_t pair = t * rows.top_k + k;
      const int row = row_of_[size_t(pair)];
      if (row < 0) continue;
      table_.axpy(rows.weights == nullptr ? 1.0f : rows.weights[pair], outputs + row * width, sum, n);
    }
  }
}

}  // namespace twofold
