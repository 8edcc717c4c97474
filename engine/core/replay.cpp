#include "twofold/replay.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace twofold {

void RoutingTrace::validate() const {
  const auto fail = [](const std::string& what) { throw std::invalid_argument("routing trace: " + what); };
  if (num_layers < 1 || top_k < 1 || num_experts < 1) {
    fail(std::to_string(num_layers) + " layers, " + std::to_string(num_experts) + " experts, top-" +
         std::to_string(top_k) + " given, at least 1 of each expected");
  }
  const size_t cells =
      static_cast<size_t>(num_tokens) * static_cast<size_t>(num_layers) * static_cast<size_t>(top_k);
  if (num_tokens < 0 || ids.size() != cells) {
    fail(std::to_string(ids.size()) + " ids given, tokens * layers * top_k = " + std::to_string(cells) +
         " expected");
  }
  if (!weights.empty() && weights.size() != cells) {
    fail(std::to_string(weights.size()) + " gate weights given, as many as ids (" + std::to_string(cells) +
         ") or none expected");
  }
  if (offsets.size() < 2 || offsets.front() != 0 || offsets.back() != num_tokens ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    fail("offsets must rise from 0 to the number of tokens (" + std::to_string(num_tokens) + ")");
  }
  const auto k = static_cast<size_t>(top_k);
  for (size_t at = 0; at < ids.size(); at += k) {
    for (size_t i = at; i < at + k; ++i) {
      const std::string where = "token " + std::to_string(at / k / static_cast<size_t>(num_layers)) +
                                ", layer " + std::to_string(at / k % static_cast<size_t>(num_layers));
      if (ids[i] >= num_experts) {
        fail("expert " + std::to_string(ids[i]) + " at " + where + " given, 0 ... " +
             std::to_string(num_experts - 1) + " expected");
      }
      for (size_t j = at; j < i; ++j) {
        if (ids[j] == ids[i]) fail("expert " + std::to_string(ids[i]) + " routed twice at " + where);
      }
    }
  }
}

BatchSchedule::BatchSchedule(const RoutingTrace& trace, int batch) : trace_(trace) {
  if (batch < 1)
    throw std::invalid_argument("replay: batch " + std::to_string(batch) + " given, >= 1 expected");
  row_.assign(static_cast<size_t>(batch), 0);
  end_.assign(static_cast<size_t>(batch), 0);
}

bool BatchSchedule::next(std::vector<int64_t>& rows, int& num_started) {
  rows.clear();
  num_started = 0;
  for (size_t lane = 0; lane < row_.size(); ++lane) {
    bool started = false;
    while (row_[lane] == end_[lane] && next_sequence_ + 1 < trace_.offsets.size()) {
      row_[lane] = trace_.offsets[next_sequence_];
      end_[lane] = trace_.offsets[next_sequence_ + 1];
      ++next_sequence_;
      started = true;
    }
    num_started += started && row_[lane] < end_[lane];
    if (row_[lane] < end_[lane]) rows.push_back(row_[lane]++);
  }
  return !rows.empty();
}

void EventReader::read(const std::vector<int64_t>& rows, int layer) {
  ids.clear();
  weights.clear();
  const auto k = static_cast<size_t>(trace_.top_k);
  for (int64_t row : rows) {
    const size_t at =
        (static_cast<size_t>(row) * static_cast<size_t>(trace_.num_layers) + static_cast<size_t>(layer)) * k;
    for (size_t i = at; i < at + k; ++i) {
      ids.push_back(trace_.ids[i]);
      if (!trace_.weights.empty()) weights.push_back(trace_.weights[i]);
    }
  }
}

std::vector<int> EventReader::distinct() const {
  std::vector<int> found(ids.begin(), ids.end());
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

std::vector<std::vector<std::vector<int>>> future_of(const RoutingTrace& trace, int batch) {
  std::vector<std::vector<std::vector<int>>> future(static_cast<size_t>(trace.num_layers));
  BatchSchedule schedule(trace, batch);
  EventReader reader(trace);
  std::vector<int64_t> rows;
  int num_started = 0;
  while (schedule.next(rows, num_started)) {
    for (int layer = 0; layer < trace.num_layers; ++layer) {
      reader.read(rows, layer);
      future[static_cast<size_t>(layer)].push_back(reader.distinct());
    }
  }
  return future;
}

ReplayCounts replay(const RoutingTrace& trace, int batch, ExpertCache& cache,
                    const std::function<void(const ReplayDecision&)>& on_decision) {
  trace.validate();
  const CacheConfig& config = cache.config();
  if (config.num_layers != trace.num_layers || config.num_experts < trace.num_experts ||
      config.top_k != trace.top_k) {
    throw std::invalid_argument("replay: cache of " + std::to_string(config.num_layers) + " layers x " +
                                std::to_string(config.num_experts) + " experts, top-" +
                                std::to_string(config.top_k) + " given, the trace's " +
                                std::to_string(trace.num_layers) + " x " + std::to_string(trace.num_experts) +
                                ", top-" + std::to_string(trace.top_k) + " expected");
  }
  if (cache.policy().offline) cache.set_future(future_of(trace, batch));

  ReplayCounts counts;
  BatchSchedule schedule(trace, batch);
  EventReader reader(trace);
  std::vector<int64_t> rows;
  std::vector<int> misses;
  int num_started = 0;
  while (schedule.next(rows, num_started)) {
    cache.boundary(num_started, static_cast<int>(rows.size()));
    for (int layer = 0; layer < trace.num_layers; ++layer) {
      reader.read(rows, layer);
      cache.observe(layer, reader.ids, reader.weights, static_cast<int>(rows.size()));
      misses.clear();
      for (int expert : cache.active(layer)) {
        if (!cache.is_resident(layer, expert)) {
          misses.push_back(expert);
          continue;
        }
        ++counts.num_hits;
        if (on_decision) on_decision({counts.num_steps, layer, expert, true, false, -1, 0, 0});
      }
      counts.num_misses += static_cast<int64_t>(misses.size());
      // Also without a miss: later bids of other layers compare with the values of this moment.
      const std::vector<double>& values = cache.values(layer);
      std::stable_sort(misses.begin(), misses.end(),
                       [&](int a, int b) { return values[size_t(a)] > values[size_t(b)]; });
      for (int expert : misses) {
        const auto admission = cache.admit(layer, expert, false);
        if (admission) {
          ++counts.num_uploads;
          counts.num_evictions += admission->evicted >= 0;
          cache.publish(admission->slot);
        }
        if (on_decision) {
          on_decision({counts.num_steps, layer, expert, false, admission.has_value(),
                       admission ? admission->evicted : -1, admission ? admission->value : 0,
                       admission ? admission->victim_value : 0});
        }
      }
    }
    ++counts.num_steps;
    counts.num_tokens += static_cast<int64_t>(rows.size());
  }
  counts.num_events = counts.num_tokens * trace.num_layers;
  return counts;
}

}  // namespace twofold
