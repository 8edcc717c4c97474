#include "twofold/simulation.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {

namespace {

void check(const RoutingTrace& trace, const LayerScheduler& scheduler, const std::vector<double>& dense_us) {
  trace.validate();
  if (dense_us.size() != static_cast<size_t>(trace.num_layers) + 1) {
    throw std::invalid_argument("simulate: dense_us of " + std::to_string(dense_us.size()) +
                                " entries given, num_layers + 1 = " + std::to_string(trace.num_layers + 1) +
                                " expected");
  }
  const CacheConfig& cache = scheduler.devices().cache(0).config();
  if (cache.num_layers != trace.num_layers || cache.num_experts < trace.num_experts ||
      cache.top_k != trace.top_k) {
    throw std::invalid_argument("simulate: the scheduler's cache has another shape than the trace");
  }
}

// Plays steps until there are none: next_step(rows, shape, sums so far) returns the composition of each.
// before_layer(layer, rows) is called when the layer's dense part has ended.
template <typename NextStep, typename BeforeLayer>
SimulationResult play(const RoutingTrace& trace, LayerScheduler& scheduler,
                      const std::vector<double>& dense_us, const std::vector<double>& token_us,
                      bool keep_layer_us, NextStep next_step, BeforeLayer before_layer) {
  const auto dense = [&](size_t stretch, size_t num_tokens) {
    return token_us.empty()
               ? dense_us[stretch]
               : std::max(dense_us[stretch], token_us[stretch] * static_cast<double>(num_tokens));
  };
  SimulationResult result;
  EventReader reader(trace);
  std::vector<int64_t> rows;
  const double start_us = scheduler.devices().now_us();
  const double link_before_us = scheduler.devices().copied_us();
  for (StepShape shape; next_step(rows, shape, result); shape = {}) {
    const bool prompt = !shape.prefill_rows.empty();
    const double step_us = scheduler.devices().now_us();
    scheduler.begin_step(std::move(shape));
    for (int layer = 0; layer < trace.num_layers; ++layer) {
      scheduler.devices().advance(dense(static_cast<size_t>(layer), rows.size()));
      before_layer(layer, rows);
      reader.read(rows, layer);
      const LayerDecision& decision =
          scheduler.decide({layer, reader.ids, reader.weights, static_cast<int>(rows.size())});
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
    scheduler.devices().advance(dense(dense_us.size() - 1, rows.size()));
    ++result.num_steps;
    result.num_tokens += static_cast<int64_t>(rows.size());
    result.total_us = scheduler.devices().now_us() - start_us;
    if (prompt) {
      result.num_prompt_tokens += static_cast<int64_t>(rows.size());
      result.prompt_us += scheduler.devices().now_us() - step_us;
    }
  }
  result.link_us = scheduler.devices().copied_us() - link_before_us;
  return result;
}

template <typename NextStep>
SimulationResult play(const RoutingTrace& trace, LayerScheduler& scheduler,
                      const std::vector<double>& dense_us, const std::vector<double>& token_us,
                      bool keep_layer_us, NextStep next_step) {
  return play(trace, scheduler, dense_us, token_us, keep_layer_us, next_step,
              [](int, const std::vector<int64_t>&) {});
}

}  // namespace

SimulationResult simulate(const RoutingTrace& trace, int batch, LayerScheduler& scheduler,
                          const std::vector<double>& dense_us, bool keep_layer_us) {
  check(trace, scheduler, dense_us);
  if (scheduler.devices().cache(0).policy().offline) {
    const auto future = future_of(trace, batch);
    for (int d = 0; d < scheduler.devices().count(); ++d) scheduler.devices().cache(d).set_future(future);
  }
  BatchSchedule schedule(trace, batch);
  return play(trace, scheduler, dense_us, {}, keep_layer_us,
              [&](std::vector<int64_t>& rows, StepShape& shape, const SimulationResult&) {
                const bool more = schedule.next(rows, shape.num_new);
                shape.num_running = static_cast<int>(rows.size());
                shape.generated_rows.assign(rows.size(), 1);
                return more;
              });
}

namespace {

void check_prompts(const char* what, int tokens, const LayerScheduler& scheduler,
                   const std::vector<double>& dense_us, const std::vector<double>& token_us) {
  if (!token_us.empty() && token_us.size() != dense_us.size()) {
    throw std::invalid_argument("simulate: token_us of " + std::to_string(token_us.size()) +
                                " entries given, as many as dense_us or none expected");
  }
  if (tokens < 1) {
    throw std::invalid_argument("simulate: " + std::string(what) + " of " + std::to_string(tokens) +
                                " tokens given, >= 1 expected");
  }
  if (scheduler.devices().cache(0).policy().offline) {
    throw std::invalid_argument("simulate: policy " + scheduler.devices().cache(0).config().policy +
                                " given, one that needs no future expected for prompts");
  }
}

// One sequence after the other; size_of(row, begin, end) is how many of its rows the step takes, all of them a
// prompt's where is_prompt(row, begin) says so.
template <typename SizeOf, typename IsPrompt>
SimulationResult play_sequences(const RoutingTrace& trace, LayerScheduler& scheduler,
                                const std::vector<double>& dense_us, const std::vector<double>& token_us,
                                bool keep_layer_us, SizeOf size_of, IsPrompt is_prompt) {
  size_t sequence = 0;
  int64_t row = 0;
  return play(trace, scheduler, dense_us, token_us, keep_layer_us,
              [&](std::vector<int64_t>& rows, StepShape& shape, const SimulationResult&) {
                while (sequence + 1 < trace.offsets.size() && row == trace.offsets[sequence + 1]) ++sequence;
                if (sequence + 1 >= trace.offsets.size()) return false;
                const int64_t begin = trace.offsets[sequence], end = trace.offsets[sequence + 1];
                shape.num_new = row == begin;
                const bool prompt = is_prompt(row, begin);
                rows.resize(static_cast<size_t>(std::min(size_of(row, begin, end), end - row)));
                for (int64_t& each : rows) each = row++;
                if (prompt) shape.prefill_rows.assign(rows.size(), 1);
                return true;
              });
}

}  // namespace

SimulationResult simulate_prompts(const RoutingTrace& trace, int chunk, LayerScheduler& scheduler,
                                  const std::vector<double>& dense_us, const std::vector<double>& token_us,
                                  bool keep_layer_us) {
  check(trace, scheduler, dense_us);
  check_prompts("chunks", chunk, scheduler, dense_us, token_us);
  return play_sequences(
      trace, scheduler, dense_us, token_us, keep_layer_us,
      [chunk](int64_t, int64_t, int64_t) { return int64_t{chunk}; }, [](int64_t, int64_t) { return true; });
}

SimulationResult simulate_requests(const RoutingTrace& trace, int prompt_tokens, LayerScheduler& scheduler,
                                   const std::vector<double>& dense_us, const std::vector<double>& token_us,
                                   bool keep_layer_us) {
  check(trace, scheduler, dense_us);
  check_prompts("prompts", prompt_tokens, scheduler, dense_us, token_us);
  return play_sequences(
      trace, scheduler, dense_us, token_us, keep_layer_us,
      [prompt_tokens](int64_t row, int64_t begin, int64_t end) {
        return row > begin ? int64_t{1}
                           : std::max(int64_t{1}, std::min(int64_t{prompt_tokens}, end - begin - 1));
      },
      [](int64_t row, int64_t begin) { return row == begin; });
}

SimulationResult simulate_steps(const RoutingTrace& trace, LayerScheduler& scheduler,
                                const std::vector<double>& dense_us, const NextRows& next_rows) {
  check(trace, scheduler, dense_us);
  if (scheduler.devices().cache(0).policy().offline) {
    throw std::invalid_argument("simulate: policy " + scheduler.devices().cache(0).config().policy +
                                " given, one that needs no future expected for drafts");
  }
  const auto& offsets = trace.offsets;
  return play(trace, scheduler, dense_us, {}, false,
              [&](std::vector<int64_t>& rows, StepShape& shape, const SimulationResult& so_far) {
                rows = next_rows(so_far);
                if (rows.empty()) return false;
                for (int64_t row : rows) {
                  if (row < 0 || row >= offsets.back()) {
                    throw std::invalid_argument("simulate: row " + std::to_string(row) + " given, 0 to " +
                                                std::to_string(offsets.back() - 1) + " expected");
                  }
                }
                shape.num_new = std::binary_search(offsets.begin(), offsets.end(), rows.front());
                shape.generated_rows.assign(rows.size(), 1);
                return true;
              });
}

namespace {

void check_recorded(const RoutingTrace& trace, const RecordedSteps& steps) {
  const auto tokens = static_cast<size_t>(trace.num_tokens);
  if (steps.begins.size() < 2 || steps.begins.front() != 0 || steps.begins.back() != trace.num_tokens ||
      !std::is_sorted(steps.begins.begin(), steps.begins.end())) {
    throw std::invalid_argument("simulate: steps must rise from 0 to the number of tokens (" +
                                std::to_string(trace.num_tokens) + ")");
  }
  if (steps.decodes.size() + 1 != steps.begins.size() || steps.requests.size() != tokens ||
      steps.positions.size() != tokens ||
      (!steps.expected.empty() && steps.expected.size() != trace.ids.size())) {
    throw std::invalid_argument(
        "simulate: a kind per step, a request and a position per token, and as many "
        "expected experts as ids or none expected");
  }
}

// The distinct experts of each event in the order in which a cache observes them: of a step with both kinds of rows the
// prompts' come first, as an event of their own.
std::vector<std::vector<std::vector<int>>> future_of(const RoutingTrace& trace,
                                                     const std::vector<StepShape>& shapes,
                                                     const RecordedSteps& steps) {
  std::vector<std::vector<std::vector<int>>> future(static_cast<size_t>(trace.num_layers));
  EventReader reader(trace);
  for (size_t step = 0; step < shapes.size(); ++step) {
    for (const int prompt : {1, 0}) {
      std::vector<int64_t> rows;
      for (int64_t row = steps.begins[step]; row < steps.begins[step + 1]; ++row)
        if (shapes[step].prefill_rows[static_cast<size_t>(row - steps.begins[step])] == prompt)
          rows.push_back(row);
      for (int layer = 0; layer < trace.num_layers && !rows.empty(); ++layer) {
        reader.read(rows, layer);
        future[static_cast<size_t>(layer)].push_back(reader.distinct());
      }
    }
  }
  return future;
}

// The composition of each step. Several rows of a request are its prompt, but drafts where the step has none.
std::vector<StepShape> shapes_of(const RecordedSteps& steps) {
  std::vector<StepShape> shapes;
  for (size_t step = 0; step + 1 < steps.begins.size(); ++step) {
    const auto first = static_cast<size_t>(steps.begins[step]);
    const size_t count = static_cast<size_t>(steps.begins[step + 1]) - first;
    const std::vector<uint8_t> verified(count, steps.decodes[step]);
    StepShape shape =
        step_shape_of(steps.requests.subspan(first, count), steps.positions.subspan(first, count), verified);
    for (const uint8_t prompt : shape.prefill_rows) shape.generated_rows.push_back(prompt == 0);
    shapes.push_back(std::move(shape));
  }
  return shapes;
}

void add_difference(SimulationResult& sum, const SimulationResult& after, const SimulationResult& before) {
  sum.num_steps += after.num_steps - before.num_steps;
  sum.num_tokens += after.num_tokens - before.num_tokens;
  sum.num_hits += after.num_hits - before.num_hits;
  sum.num_cpu += after.num_cpu - before.num_cpu;
  sum.num_fetched += after.num_fetched - before.num_fetched;
  sum.num_uploads += after.num_uploads - before.num_uploads;
  sum.num_evictions += after.num_evictions - before.num_evictions;
  sum.total_us += after.total_us - before.total_us;
  sum.moe_us += after.moe_us - before.moe_us;
  sum.cpu_us += after.cpu_us - before.cpu_us;
  sum.gpu_us += after.gpu_us - before.gpu_us;
}

}  // namespace

SimulationResult simulate_recorded(const RoutingTrace& trace, const RecordedSteps& steps,
                                   int64_t first_counted, LayerScheduler& scheduler,
                                   const std::vector<double>& dense_us, const std::vector<double>& token_us) {
  check(trace, scheduler, dense_us);
  check_recorded(trace, steps);
  constexpr size_t kMostLookAheadRows = 32;  // as SlottedAccelerator::needs_look_ahead
  const std::vector<StepShape> shapes = shapes_of(steps);
  ExpertCache& cache = scheduler.devices().cache(0);
  if (cache.policy().offline) cache.set_future(future_of(trace, shapes, steps));
  SimulationResult counted, before;
  size_t step = 0;
  const auto count_last = [&](const SimulationResult& so_far) {
    const bool counts =
        step > 0 && static_cast<int64_t>(step) > first_counted && steps.decodes[step - 1] != 0;
    if (counts) add_difference(counted, so_far, before);
    before = so_far;
  };
  std::vector<float> logits;
  const auto look_ahead = [&](int layer, const std::vector<int64_t>& rows) {
    if (!scheduler.prefetches() || steps.expected.empty() || layer + 1 >= trace.num_layers ||
        steps.decodes[step - 1] == 0 || rows.size() > kMostLookAheadRows)
      return;
    logits.assign(rows.size() * static_cast<size_t>(cache.config().num_experts), 0.0F);
    const auto k = static_cast<size_t>(trace.top_k);
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t at = (static_cast<size_t>(rows[i] * trace.num_layers + layer + 1)) * k;
      for (const uint16_t expert : steps.expected.subspan(at, k))
        logits[i * static_cast<size_t>(cache.config().num_experts) + expert] = 1.0F;
    }
    scheduler.predict(layer + 1, logits, static_cast<int>(rows.size()));
  };
  const SimulationResult all = play(
      trace, scheduler, dense_us, token_us, false,
      [&](std::vector<int64_t>& rows, StepShape& shape, const SimulationResult& so_far) {
        count_last(so_far);
        if (step == shapes.size()) return false;
        rows.clear();
        for (int64_t row = steps.begins[step]; row < steps.begins[step + 1]; ++row) rows.push_back(row);
        shape = shapes[step++];
        return true;
      },
      look_ahead);
  counted.link_us = all.link_us;
  return counted;
}

}  // namespace twofold
