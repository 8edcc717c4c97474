// What the predicted times of layers are off by now: the machine's clock speed, its neighbours, and what a
// layer meets in a real step and never met in calibration. Factors only; nothing here reads a clock.
#pragma once

#include <vector>

namespace twofold {

class LayerCorrection {
 public:
  explicit LayerCorrection(int num_layers) : num_layers_(num_layers) {}

  // What the cost model's time of this layer is to be multiplied by before it runs.
  double factor(int layer, int num_tokens) const;
  // predicted_us carries the factor already.
  void update(int layer, int num_tokens, double predicted_us, double measured_us);

 private:
  // How far one layer lies from the others (another format, what runs before it).
  struct Part {
    double error = 0;  // as a logarithm: twice too slow and twice too fast weigh the same
    int num_updates = 0;
  };
  // Batches of up to twice as many tokens: different limits bind small and large ones.
  struct Kind {
    double error = 0;
    int num_updates = 0;
    std::vector<double> first;  // what `error` was before, and what the first measurements would have it be
    std::vector<Part> layers;
  };
  static constexpr int kNumKinds = 16;  // the last one takes all beyond

  static int kind_of(int num_tokens);
  // What the kind's `error` becomes by this one of the layer just measured.
  static double updated(Kind& kind, double error);
  // The kind itself, or while nothing is known of it the nearest one that is; null at the very beginning.
  const Kind* known(int kind) const;

  int num_layers_;
  Kind kinds_[kNumKinds];
};

}  // namespace twofold
