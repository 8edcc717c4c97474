// Gated feed-forwards on packed weights: groups of rows, each with its own feed-forward, and each token's
// weighted sum. Serves routed experts and dense layers alike.
//
// One loop of phases under one fork: rows are encoded; panels of gate and up are multiplied into a tile in the
// nearest cache, gated, and encoded at once for the down matrix (in a separate phase if a scale belongs to the
// whole row); panels of down follow, group after group, so that a thread reads memory as one stream; each
// token's results are added up. Counters, not barriers, order dependent phases.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "host/function_ref.h"
#include "host/thread_pool.h"
#include "ops/linear.h"
#include "ops/low_rank.h"
#include "ops/packed_matrix.h"
#include "twofold/kernels.h"
#include "twofold/rounding.h"

namespace twofold {

struct FfnFormats {
  kernels::WeightFormat gate, up, down;
  float limit = 0;  // bound of gate and up (expert.h); 0: none

  bool operator==(const FfnFormats&) const = default;
};

// Addresses of one feed-forward's panels: gate and up [intermediate, hidden], down [hidden, intermediate].
struct FfnPanels {
  const std::byte* gate;
  const std::byte* up;
  const std::byte* down;
  // Biases of their rows; null: none.
  const float* gate_bias = nullptr;
  const float* up_bias = nullptr;
  const float* down_bias = nullptr;
  // What adapters add to them (low_rank.h); null: nothing.
  const MatrixAdapters* gate_adapters = nullptr;
  const MatrixAdapters* up_adapters = nullptr;
  const MatrixAdapters* down_adapters = nullptr;
};

// Rows of a step in groups: group g has rows [begin[g], begin[g + 1]), row r being rank pairs[r] % top_k of
// token pairs[r] / top_k. Pairs in no group are computed elsewhere and left out.
struct FfnRows {
  std::span<const FfnPanels> groups;
  std::span<const int> begin;
  std::span<const int> pairs;
  int num_tokens;
  int top_k;
  const float* weights;  // [num_tokens, top_k]; null: all 1
  // Adapter of each token; empty: none uses one.
  std::span<const int32_t> adapters = {};
  // Pairs that other ranks compute, in the order of their rows of outputs, which follow those of the groups.
  std::span<const int> elsewhere = {};
  // Called with the rows of outputs, `stride` apart, before they are added up: fills those of `elsewhere`, or takes
  // those of the groups. Null: neither.
  using Outputs = FunctionRef<void(float* outputs, int64_t stride)>;
  const Outputs* exchange = nullptr;
};

class PackedFfn {
 public:
  // rounding: the rounding between the two products, the host's or the device's.
  PackedFfn(const kernels::KernelTable& table, ThreadPool& pool, int hidden, int intermediate,
            kernels::Rounding rounding = kernels::Rounding::kOfLevel,
            kernels::ExpertActivation activation = kernels::ExpertActivation::kSilu)
      : table_(table),
        pool_(pool),
        hidden_(hidden),
        intermediate_(intermediate),
        rounding_(rounding),
        gated_(table.gated_as(activation)) {}

  // sum[t] += sum over rank k of weights[t, k] * down(gated(gate(x_t), up(x_t))), in rank order. formats: one for all
  // groups, or one each. input and sum are [num_tokens, hidden]; without a sum, the exchange has the outputs.
  void run(std::span<const FfnFormats> formats, const FfnRows& rows, const InputRows& input, float* sum);

  int hidden() const { return hidden_; }
  int intermediate() const { return intermediate_; }

 private:
  struct Step;
  void plan(const FfnRows& rows, bool adapted);
  // Whether a row between the two products is encoded as a whole, after all pieces of gate and up.
  bool encodes_whole_rows(const FfnFormats& formats) const {
    return table_.formats[int(formats.down)].activation == kernels::ActivationKind::kQ8Token;
  }
  void encode_tokens(Step& step, int64_t first, int64_t end, float* temporary);
  void read_input(const Step& step, int row, float* temporary);
  void gate_and_up(Step& step, const PanelRange& piece);
  void finish_inner(Step& step, int64_t chunk);
  bool finishes_rows(const Step& step, int group) const;
  void down(Step& step, const PanelRange& piece);
  void add_up(const Step& step, int64_t chunk);

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  int hidden_, intermediate_;
  kernels::Rounding rounding_;
  kernels::GatedActivation gated_;
  std::vector<FfnFormats> formats_;  // as multiplied: one for all groups of the run, or one each
  std::vector<kernels::WeightFormat> of_inputs_, of_inner_;  // formats that are multiplied with either
  std::vector<int> row_of_;                                  // pair -> row, -1 where there is none
  PanelPieces gate_up_pieces_, down_pieces_;
  double total_us_ = 0;
  // The parameters that the pieces were made for.
  int planned_groups_ = 0, planned_rows_ = 0;
  bool planned_adapted_ = false;
  std::vector<FfnFormats> planned_formats_;
  std::unique_ptr<Countdown[]> gated_left_, group_left_;
  int group_capacity_ = 0;
};

}  // namespace twofold
