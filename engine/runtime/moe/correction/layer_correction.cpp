#include "moe/correction/layer_correction.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace twofold {

namespace {

// A layer is early, late, or preempted by the operating system; a preemption tells nothing about the next
// layer. So an error counts in full up to a tenth and no more beyond: the correction follows the usual time,
// not the average.
constexpr double kUsual = 0.1;
constexpr double kRate = 0.3;
constexpr double kLayerRate = 0.05;
// The median of a kind's first measurements and the calibration is used: the very first layer of all meets
// untouched memory.
constexpr int kFirst = 8;
constexpr int kLayerFirst = 4;
constexpr double kLayerAtMost = 0.7;

double bounded(double error, double limit) { return std::clamp(error, -limit, limit); }

}  // namespace

int LayerCorrection::kind_of(int num_tokens) {
  const int power = std::bit_width(static_cast<unsigned>(std::max(num_tokens, 1))) - 1;
  return std::min(power, kNumKinds - 1);
}

const LayerCorrection::Kind* LayerCorrection::known(int kind) const {
  for (int distance = 0; distance < kNumKinds; ++distance) {
    for (int at : {kind - distance, kind + distance}) {
      if (at >= 0 && at < kNumKinds && kinds_[at].num_updates > 0) return &kinds_[at];
    }
  }
  return nullptr;
}

double LayerCorrection::factor(int layer, int num_tokens) const {
  const Kind* kind = known(kind_of(num_tokens));
  return kind == nullptr ? 1.0 : std::exp(kind->error + kind->layers[static_cast<size_t>(layer)].error);
}

double LayerCorrection::updated(Kind& kind, double error) {
  if (++kind.num_updates > kFirst) return kind.error + kRate * bounded(error, kUsual);
  kind.first.push_back(kind.error + error);
  std::vector<double> sorted = kind.first;
  std::sort(sorted.begin(), sorted.end());
  return (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
}

void LayerCorrection::update(int layer, int num_tokens, double predicted_us, double measured_us) {
  if (predicted_us <= 0 || measured_us <= 0) return;
  const int number = kind_of(num_tokens);
  Kind& kind = kinds_[number];
  if (kind.num_updates == 0) {
    const Kind* nearest = known(number);
    kind.error = nearest == nullptr ? 0.0 : nearest->error;
    kind.first.assign(1, kind.error);
    kind.layers.assign(static_cast<size_t>(num_layers_), {});
    if (nearest != nullptr) {
      for (size_t i = 0; i < kind.layers.size(); ++i) kind.layers[i].error = nearest->layers[i].error;
    }
  }
  const double error = std::log(measured_us / predicted_us);
  const double before = kind.error;
  kind.error = updated(kind, error);
  const double step = kind.error - before;
  Part& part = kind.layers[static_cast<size_t>(layer)];
  ++part.num_updates;
  // A layer's own deviation is learned slowly: it does not change.
  part.error += std::max(kLayerRate, 1.0 / (kFirst + part.num_updates)) *
                bounded(error - step, part.num_updates > kLayerFirst ? kUsual : kLayerAtMost);
}

}  // namespace twofold
