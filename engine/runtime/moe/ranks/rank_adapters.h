// Parts of adapters that rank 0 sends to the ranks that hold their experts.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "host/ranks.h"
#include "ops/low_rank.h"

namespace twofold {

// One matrix of an expert: 0 gate, 1 up, 2 down.
struct ExpertPlace {
  int layer, expert, matrix;
};

// Sends a part to rank `to` and waits until it has it. Throws RankFailure.
void send_adapter(Ranks& ranks, int to, const ExpertPlace& place, int adapter, const LowRank& part);
// Lets all other ranks drop an adapter. Throws RankFailure.
void send_drop(Ranks& ranks, int adapter);

// A job of send_adapter as another rank reads it.
struct AdapterJob {
  ExpertPlace place;
  int adapter;
  std::shared_ptr<LowRank> part;
};

// Throws std::invalid_argument for a damaged job.
AdapterJob read_adapter_job(std::span<const int32_t> job, std::span<const float> values);

}  // namespace twofold
