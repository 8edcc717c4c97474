#include "twofold/step_shape.h"

#include <map>
#include <stdexcept>

namespace twofold {

StepShape step_shape_of(std::span<const int64_t> requests, std::span<const int32_t> positions,
                        std::span<const uint8_t> verified) {
  if (requests.size() != positions.size()) {
    throw std::invalid_argument("step_shape_of: one position per row expected");
  }
  std::map<int64_t, int> rows_of;
  StepShape shape;
  for (size_t row = 0; row < requests.size(); ++row) {
    ++rows_of[requests[row]];
    shape.num_new += positions[row] == 0;
  }
  shape.num_running = rows_of.empty() ? 1 : static_cast<int>(rows_of.size());
  shape.prefill_rows.reserve(requests.size());
  for (size_t row = 0; row < requests.size(); ++row)
    shape.prefill_rows.push_back(rows_of[requests[row]] > 1 && (verified.empty() || !verified[row]));
  return shape;
}

}  // namespace twofold
