// Online correction of predicted layer times for effects missing from the calibration: the machine's clock
// speed, its neighbours, and the conditions of real steps. Factors only; nothing here reads a clock.
#pragma once

#include <vector>

namespace twofold {

class LayerCorrection {
 public:
  explicit LayerCorrection(int num_layers) : num_layers_(num_layers) {}

  // The factor for the cost model's time of this layer, before it runs.
  double factor(int layer, int num_tokens) const;
  // predicted_us includes the factor already.
  void update(int layer, int num_tokens, double predicted_us, double measured_us);

 private:
  // Deviation of one layer from the others (another format, other work before it).
  struct Part {
    double error = 0;  // as a logarithm: twice too slow and twice too fast weigh the same
    int num_updates = 0;
  };
  // Batches of up to twice as many tokens: different limits bind small and large ones.
  struct Kind {
    double error = 0;
    int num_updates = 0;
    std::vector<double> first;  // the earlier `error`, and its values by the first measurements
    std::vector<Part> layers;
  };
  static constexpr int kNumKinds = 16;  // the last one takes all beyond

  static int kind_of(int num_tokens);
  // The kind's new `error` after the layer just measured.
  static double updated(Kind& kind, double error);
  // The kind itself, or the nearest kind with measurements; null at the very beginning.
  const Kind* known(int kind) const;

  int num_layers_;
  Kind kinds_[kNumKinds];
};

}  // namespace twofold
