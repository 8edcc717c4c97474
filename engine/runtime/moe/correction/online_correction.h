// Running ratio of measured to predicted time of one kind of work: corrects an old calibration.
#pragma once

namespace twofold {

class OnlineCorrection {
 public:
  double factor() const { return factor_; }
  // predicted_us includes the factor already. One outlier (a context switch) moves the factor by at most a
  // tenth of kLargestRatio.
  void update(double predicted_us, double measured_us);

 private:
  static constexpr double kSmoothing = 0.05;
  static constexpr double kLargestRatio = 2.0;
  double factor_ = 1.0;
};

}  // namespace twofold
