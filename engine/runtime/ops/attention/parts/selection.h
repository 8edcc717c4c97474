// Select: which positions a query attends to: one stretch of positions, or those of it that a chooser chose one by one.
#pragma once
#include <algorithm>
#include <memory>
#include <string>

#include "ops/attention/attention_batch.h"
#include "ops/state_cache.h"
#include "ops/tensor_view.h"
#include "twofold/attention_parts.h"

namespace twofold {

// Rows of a batch's tokens, from which positions are chosen.
struct ChooserInput {
  const float* hidden;  // [T, hidden size], the block's input
  const float*
      projected;  // [T, width], `project` of it; latent attention's low-rank queries come first, without their norm
  int64_t width;
};

inline constexpr int kChooserScratch = 2;

// Chooses positions for the tokens of one layer. A kind derives from it and brings its own weights and state.
class Chooser {
 public:
  virtual ~Chooser() = default;

  // Planes of the layer's pages that follow those of keys and values and belong to this kind.
  virtual int num_planes() const { return 0; }
  // Lists per token: one, or one for the heads of each key head.
  virtual int num_lists() const { return 1; }
  // Writes the lists of each token, of positions up to its own. The tokens' keys are stored by then. The caller holds the
  // pool's scratch, of which linear()'s slots and three from kChooserScratch on are free.
  virtual void choose(const ChooserInput& input, const AttentionBatch& batch, const StateCache& cache,
                      int layer, ChosenPositions& chosen) = 0;
};

struct Selection {
  kernels::Stretch stretch = {};
  int most = 0;  // positions that are chosen for a query; 0: it attends to all of its stretch
  // Null if positions are chosen: the layer attends to those that the last chooser of the step chose.
  std::shared_ptr<Chooser> chooser = nullptr;
  bool bidirectional = false;  // whether tokens of a picture attend to one another

  int num_planes() const { return chooser == nullptr ? 0 : chooser->num_planes(); }
  // Bound of the positions that the token at `position` attends to.
  int bound(int position) const { return most == 0 ? position + 1 : std::min(position + 1, most); }
  // Before a layer attends. Throws KernelFailure if no layer of the step has chosen what this one reads.
  void prepare(const ChooserInput& input, AttentionBatch& batch, const StateCache& cache, int layer) const {
    if (most == 0) return;
    ChosenPositions& chosen = batch.chosen;
    if (chooser != nullptr) {
      chosen.start(batch.num_tokens(), most, chooser->num_lists());
      chooser->choose(input, batch, cache, layer, chosen);
    } else if (chosen.num_tokens() != batch.num_tokens()) {
      throw KernelFailure("Attention: layer " + std::to_string(layer) +
                          " reads chosen positions; no earlier layer of this step has chosen any");
    }
  }
};

}  // namespace twofold
