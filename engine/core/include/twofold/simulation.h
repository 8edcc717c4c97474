// Discrete-event simulation of decoding a recorded trace: the serving scheduler decides every layer, the
// virtual clock plays it (link queue, slots in flight, publication at step boundaries, contention). Only the
// arithmetic is missing, so its layer times equal the emulated accelerator's for the same routing.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "twofold/layer_scheduler.h"
#include "twofold/replay.h"

namespace twofold {

struct SimulationResult {
  int64_t num_steps = 0;
  int64_t num_tokens = 0;
  int64_t num_hits = 0;  // distinct active experts per layer and step
  int64_t num_cpu = 0;
  int64_t num_fetched = 0;
  int64_t num_uploads = 0;  // including fetched ones
  int64_t num_evictions = 0;
  double total_us = 0;
  int64_t num_prompt_tokens = 0;  // of num_tokens
  double prompt_us = 0;           // of total_us, in prompt steps
  double moe_us = 0;              // of total_us, in MoE layers
  double cpu_us = 0;              // CPU busy, handshake included
  double gpu_us = 0;              // accelerator busy or waiting for an upload
  double link_us = 0;             // link copying
  std::vector<float> layer_us;    // [steps * layers], if requested
};

// dense_us: time of the work outside the experts: before each MoE layer, and after the last (head); num_layers
// + 1 entries, for one step.
SimulationResult simulate(const RoutingTrace& trace, int batch, LayerScheduler& scheduler,
                          const std::vector<double>& dense_us, bool keep_layer_us = false);
// The same for prompts: each sequence of the trace alone, `chunk` tokens per step. A dense stretch takes
// dense_us, but at least token_us (as many entries, or none) times the step's tokens. Offline policies have no
// future here: std::invalid_argument.
SimulationResult simulate_prompts(const RoutingTrace& trace, int chunk, LayerScheduler& scheduler,
                                  const std::vector<double>& dense_us, const std::vector<double>& token_us,
                                  bool keep_layer_us = false);
// Each sequence as one request, one after the other: its first prompt_tokens (at most all but one) in one step,
// the others decoded one by one.
SimulationResult simulate_requests(const RoutingTrace& trace, int prompt_tokens, LayerScheduler& scheduler,
                                   const std::vector<double>& dense_us, const std::vector<double>& token_us,
                                   bool keep_layer_us = false);

// Token rows of the next step, given the sums so far; empty at the end.
using NextRows = std::function<std::vector<int64_t>(const SimulationResult&)>;
// One decoding sequence at a time, whose steps the caller composes: a step's first row is its newest token, the
// others are drafted. std::invalid_argument for a row that the trace does not have.
SimulationResult simulate_steps(const RoutingTrace& trace, LayerScheduler& scheduler,
                                const std::vector<double>& dense_us, const NextRows& next_rows);

// Steps as a run recorded them, over the rows of a trace. Views only.
struct RecordedSteps {
  std::span<const int64_t> begins;     // [steps + 1]: step i is rows begins[i] ... begins[i + 1] - 1
  std::span<const int64_t> requests;   // [num_tokens]
  std::span<const int32_t> positions;  // [num_tokens]
  std::span<const uint8_t> decodes;    // [steps]: 1 without prompt tokens
  // [num_tokens][num_layers][top_k]: experts that the layer before expects of its look-ahead router; empty without
  // prefetch.
  std::span<const uint16_t> expected;
};
// Plays every step with the composition that it had; the sums are those of the decode steps from first_counted on.
// std::invalid_argument for steps that are not the trace's.
SimulationResult simulate_recorded(const RoutingTrace& trace, const RecordedSteps& steps,
                                   int64_t first_counted, LayerScheduler& scheduler,
                                   const std::vector<double>& dense_us,
                                   const std::vector<double>& token_us = {});

}  // namespace twofold
