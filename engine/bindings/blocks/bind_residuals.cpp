// Blocks that put outputs of other blocks into the residual stream.
#include <memory>
#include <string>

#include "blocks/bind_blocks.h"
#include "blocks/block_arguments.h"
#include "moe/residual.h"

namespace twofold::bindings {
namespace {

std::shared_ptr<PostNorm> make_post_norm(BlockArguments given) {
  const TensorView norm = given.array("norm_weight");
  const float* weight = expect_f32(norm, given.where("norm_weight").c_str(), {kAny});
  const auto eps = given.value<float>("eps");
  const int over = given.at_least(1, "over");
  return given.own(PostNorm(given.pool().kernels(), given.pool(), weight, static_cast<int>(norm.shape[0]),
                            eps, over, given.value("scale", 1.0f)));
}

// groups: weights of a stream that it has.
std::shared_ptr<StreamMix> weighted_streams_of(BlockArguments& given, int groups) {
  const int streams = given.at_least(2, "num_streams");
  const int rounds = groups > 1 ? given.positive_or_zero("rounds") : 0;
  const int rows = groups * streams + (rounds > 0 ? streams * streams : 0);
  const PackedMatrix& mix = given.packed("mix", rows, kAny);
  if (mix.columns() % streams != 0) {
    throw given.failure("mix has " + std::to_string(mix.columns()) + " columns; expected a multiple of " +
                        std::to_string(streams) + " streams");
  }
  StreamWeights weights{.mix = &mix,
                        .base = given.vector("base", rows),
                        .scale = given.vector("scale", groups + (rounds > 0)),
                        .eps = given.value<float>("eps"),
                        .offset = given.value<float>("offset"),
                        .magnitude = groups > 1 ? given.value<float>("magnitude") : 1.0f,
                        .rounds = rounds};
  weights.output_offset = given.has("output_offset") ? given.value<float>("output_offset") : weights.offset;
  return std::make_shared<WeightedStreams>(given.pool().kernels(), given.pool(), weights, streams);
}

std::shared_ptr<StreamMix> gated_streams_of(BlockArguments& given, bool injects) {
  const int streams = given.at_least(2, "num_streams");
  const PackedMatrix& down = given.packed("down", kAny, kAny);
  if (down.columns() % streams != 0) {
    throw given.failure("down has " + std::to_string(down.columns()) + " columns; expected a multiple of " +
                        std::to_string(streams) + " streams");
  }
  const StreamGates gates{
      .norm = given.vector("norm", down.columns()),
      .eps = given.value<float>("eps"),
      .down = &down,
      .up = &given.packed("up", down.columns(), down.rows()),
      .inject = injects ? &given.packed("inject", streams, down.columns()) : nullptr,
  };
  return std::make_shared<GatedStreams>(given.pool().kernels(), given.pool(), gates, streams);
}

std::shared_ptr<GatedNorm> make_gated_norm(BlockArguments given) {
  const PackedMatrix& up = given.packed("up", kAny, kAny);
  const PackedMatrix& down = given.packed("down", up.columns(), up.rows());
  const float* norm = given.vector("norm_weight", up.rows());
  const auto eps = given.value<float>("eps");
  const int over = given.at_least(1, "over");
  return given.own(GatedNorm(given.pool().kernels(), given.pool(), norm, eps, down, up, over));
}

std::shared_ptr<HyperConnection> make_hyper_connection(BlockArguments given) {
  const auto mix = given.has("down") ? gated_streams_of(given, true) : weighted_streams_of(given, 2);
  const int over = given.at_least(1, "over");
  return given.own(HyperConnection(given.pool(), mix, over));
}

std::shared_ptr<StreamHead> make_stream_head(BlockArguments given) {
  return given.own(
      StreamHead(given.has("down") ? gated_streams_of(given, false) : weighted_streams_of(given, 1)));
}

}  // namespace

void bind_residuals(pybind11::module_& m) {
  bind_block<PostNorm>(m, "PostNorm", "Norm of the sum of the blocks before it.", &make_post_norm);
  bind_block<GatedNorm>(m, "GatedNorm", "Norm with a gate, which the blocks before it read.",
                        &make_gated_norm);
  bind_block<HyperConnection>(m, "HyperConnection",
                              "Joins the blocks before it with several residual streams.",
                              &make_hyper_connection);
  bind_block<StreamHead>(m, "StreamHead", "The last hidden state, from several residual streams.",
                         &make_stream_head);
}

}  // namespace twofold::bindings
