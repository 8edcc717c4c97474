#include "ops/ffn_adapters.h"

#include <algorithm>

namespace twofold {

FfnAdapters::FfnAdapters(ThreadPool& pool, const FfnRows& rows) {
  if (rows.adapters.empty()) return;
  std::vector<Row> found(rows.pairs.size());
  groups_.assign(rows.groups.size(), 0);
  for (size_t g = 0; g < rows.groups.size(); ++g) {
    const FfnPanels& panels = rows.groups[g];
    for (int r = rows.begin[g]; r < rows.begin[g + 1]; ++r) {
      const int token = rows.pairs[size_t(r)] / rows.top_k;
      int32_t adapter = rows.adapters[size_t(token)];
      int width = 0;
      for (const MatrixAdapters* part : {panels.gate_adapters, panels.up_adapters, panels.down_adapters}) {
        if (part != nullptr) width = std::max(width, part->width(adapter));
      }
      if (width == 0) adapter = AdapterRows::kNone;
      width_ = std::max(width_, width);
      groups_[g] |= uint8_t(width > 0);
      found[size_t(r)] = {&panels, adapter, token};
    }
  }
  if (width_ == 0) return;
  rows_ = std::move(found);
  t_ = pool.scratch_floats(kLowRankScratch, int64_t{3} * width_ * num_rows());
}

// Null where the row's adapter leaves the part as it is.
const MatrixAdapters* FfnAdapters::of(Part part, int row) const {
  const Row& own = rows_[size_t(row)];
  if (own.adapter == AdapterRows::kNone) return nullptr;
  const FfnPanels& panels = *own.panels;
  return part == kGate ? panels.gate_adapters : part == kUp ? panels.up_adapters : panels.down_adapters;
}

void FfnAdapters::read(const kernels::KernelTable& table, Part part, int row, const float* x) const {
  if (const MatrixAdapters* const adapters = of(part, row))
    adapters->down(table, rows_[size_t(row)].adapter, x, 0, width_, ranks(part, row));
}

void FfnAdapters::read_input(const kernels::KernelTable& table, int row, const float* x) const {
  read(table, kGate, row, x);
  const MatrixAdapters *const gate = of(kGate, row), *const up = of(kUp, row);
  const int adapter = rows_[size_t(row)].adapter;
  if (gate != nullptr && up != nullptr && up->has_same_down(*gate, adapter))
    std::copy_n(ranks(kGate, row), up->width(adapter), ranks(kUp, row));
  else
    read(table, kUp, row, x);
}

void FfnAdapters::add(const kernels::KernelTable& table, Part part, int row, int first, int count,
                      float* y) const {
  if (const MatrixAdapters* const adapters = of(part, row))
    adapters->up(table, rows_[size_t(row)].adapter, ranks(part, row), first, count, y);
}

}  // namespace twofold
