#include "moe/correction/online_correction.h"

#include <algorithm>
#include <cmath>

namespace twofold {

void OnlineCorrection::update(double predicted_us, double measured_us) {
  if (predicted_us <= 0 || measured_us <= 0) return;
  // In logarithms, so that twice too slow and twice too fast weigh the same.
  const double limit = std::log(kLargestRatio);
  const double error = std::clamp(std::log(measured_us / predicted_us), -limit, limit);
  factor_ *= std::exp(kSmoothing * error);
}

}  // namespace twofold
