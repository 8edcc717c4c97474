// The composition of a step, as far as decisions need it: which rows are prompt tokens, how many requests
// begin.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace twofold {

struct StepShape {
  std::vector<uint8_t> prefill_rows;         // per token; empty: all rows are decode tokens
  int num_new = 0;                           // requests whose first token is in this step
  int num_running = 1;                       // requests in this step
  std::vector<uint8_t> generated_rows = {};  // per token: generated, not prompt; empty: none is generated
};

// From one request number and position per row: a request with position 0 is new, one with several rows is in
// prefill. Rows marked in `verified` (per row; empty: none) are a request's next token and its drafts, which are
// decode tokens.
StepShape step_shape_of(std::span<const int64_t> requests, std::span<const int32_t> positions,
                        std::span<const uint8_t> verified = {});

}  // namespace twofold
