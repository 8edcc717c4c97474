// Steps of a model that only moves bytes, on a fake device: does every layer find its experts?
#pragma once
#include <cstdint>
#include <string>

#include "fake_device.h"

namespace twofold::fake {

struct StressShape {
  uint64_t seed = 0;
  int num_layers = 4;
  int num_experts = 8;
  int top_k = 2;
  int num_slots = 10;
  int num_staging = 4;
  int num_steps = 60;
  std::string policy = "payback";
  bool prefetch = false;
  bool pinned = true;
  double table_steps = 0.7;  // share of steps that the device places itself
  double chunks = 0;         // share of steps of many tokens, in which the next layer is uploaded ahead
  bool ahead = true;         // the host goes on before the device has finished
  double most_delay_us = 0;
  double fail_issue = 0;
  double fail_completion = 0;
  // Mistakes that must be found: uploads do not wait for a slot's reader, kernels do not wait for uploads.
  bool ignore_readers = false;
  bool ignore_uploads = false;
};

struct StressCounts {
  int64_t reads = 0;  // of slots, each compared byte by byte
  int64_t hits = 0, cpu = 0, fetched = 0;
  int64_t begun_ahead = 0, used_ahead = 0;
  int64_t landed = 0, failed = 0, held = 0, refused = 0, lost_steps = 0;
  int64_t largest_batch = 0, mixed_batches = 0;
};

// Throws std::runtime_error saying what a layer found instead of its expert, or what was lost.
StressCounts stress(const StressShape& shape);

}  // namespace twofold::fake
