// Running ratio of measured to predicted time: what a calibration of another day is off by today (clock
// speed, neighbours, memory).
#pragma once

namespace twofold {

class OnlineCorrection {
 public:
  // Decode and batches are corrected apart, because different limits bind them.
  double factor(int num_tokens) const { return factor_[num_tokens > 1]; }
  // predicted_us carries the factor already. One outlier (a context switch) moves the factor by at most a
  // tenth of kLargestRatio.
  void update(int num_tokens, double predicted_us, double measured_us);

 private:
  static constexpr double kSmoothing = 0.05;
  static constexpr double kLargestRatio = 2.0;
  double factor_[2] = {1.0, 1.0};
};

}  // namespace twofold
