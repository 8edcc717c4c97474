#include "twofold/simulation.h"

#include <stdexcept>
#include <string>

namespace twofold {

SimulationResult simulate(const RoutingTrace& trace, int batch, LayerScheduler& scheduler,
                          const std::vector<double>& dense_us, bool keep_layer_us) {
  trace.validate();
  if (dense_us.size() != static_cast<size_t>(trace.num_layers) + 1) {
    throw std::invalid_argument("simulate: dense_us of " + std::to_string(dense_us.size()) +
                                " entries given, num_layers + 1 = " + std::to_string(trace.num_layers + 1) +
                                " expected");
  }
  const CacheConfig& cache = scheduler.cache().config();
  if (cache.num_layers != trace.num_layers || cache.num_experts < trace.num_experts ||
      cache.top_k != trace.top_k) {
    throw std::invalid_argument("simulate: the scheduler's cache has another shape than the trace");
  }
  if (cache_policy_is_offline(cache.policy)) scheduler.cache().set_future(future_of(trace, batch));

  SimulationResult result;
  BatchSchedule schedule(trace, batch);
  EventReader reader(trace);
  std::vector<int64_t> rows;
  int num_new = 0;
  const double start_us = scheduler.now_us();
  const double link_before_us = scheduler.link_us();
  while (schedule.next(rows, num_new)) {
    StepShape shape;
    shape.num_new = num_new;
    shape.num_running = static_cast<int>(rows.size());
    scheduler.begin_step(std::move(shape));
    for (int layer = 0; layer < trace.num_layers; ++layer) {
      scheduler.advance(dense_us[static_cast<size_t>(layer)]);
      reader.read(rows, layer);
      const LayerDecision& decision =
          scheduler.decide(layer, reader.ids, reader.weights, static_cast<int>(rows.size()));
      for (const ExpertDecision& expert : decision.experts) {
        result.num_hits += expert.where == Placement::kHit;
        result.num_cpu += expert.where == Placement::kCpu;
        result.num_fetched += expert.where == Placement::kFetched;
      }
      for (const Move& move : decision.moves) {
        ++result.num_uploads;
        result.num_evictions += move.evicted >= 0;
      }
      result.moe_us += decision.times.layer_us;
      result.cpu_us += decision.times.cpu_us;
      result.gpu_us += decision.times.gpu_us;
      if (keep_layer_us) result.layer_us.push_back(static_cast<float>(decision.times.layer_us));
    }
    scheduler.advance(dense_us.back());
    ++result.num_steps;
    result.num_tokens += static_cast<int64_t>(rows.size());
  }
  result.total_us = scheduler.now_us() - start_us;
  result.link_us = scheduler.link_us() - link_before_us;
  return result;
}

}  // namespace twofold
