#include "ops/gated_ffn.h"

#include "host/work_clock.h"

namespace twofold {

GatedFfn::GatedFfn(const kernels::KernelTable& table, ThreadPool& pool, const PackedMatrix& gate,
                   const PackedMatrix& up, const PackedMatrix& down, kernels::ExpertActivation activation,
                   float limit)
    : ffn_(table, pool, static_cast<int>(gate.columns()), static_cast<int>(gate.rows()),
           kernels::Rounding::kOfLevel, activation),
      panels_{gate.segments().front().panels, up.segments().front().panels, down.segments().front().panels},
      formats_{gate.segments().front().format, up.segments().front().format, down.segments().front().format,
               limit} {}

void GatedFfn::forward(const InputRows& input, const float* weights, float* sum, int T) {
  if (T == 0) return;
  const WorkTimer timer(Work::kDenseFfn);
  while (static_cast<int>(rows_.size()) < T) rows_.push_back(static_cast<int>(rows_.size()));
  const int begin[] = {0, T};
  ffn_.run(formats_,
           {.groups = {&panels_, 1},
            .begin = begin,
            .pairs = {rows_.data(), static_cast<size_t>(T)},
            .num_tokens = T,
            .top_k = 1,
            .weights = weights},
           input, sum);
}

}  // namespace twofold
