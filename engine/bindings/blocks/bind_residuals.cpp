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
StreamMix stream_mix_of(BlockArguments& given, int groups) {
  const int streams = given.at_least(2, "num_streams");
  const PackedMatrix& mix = given.packed("mix", groups * streams, kAny);
  if (mix.columns() % streams != 0) {
    throw given.failure("mix has " + std::to_string(mix.columns()) + " columns; expected a multiple of " +
                        std::to_string(streams) + " streams");
  }
  return {.mix = &mix,
          .base = given.vector("base", groups * streams),
          .scale = given.vector("scale", groups),
          .num_streams = streams,
          .eps = given.value<float>("eps"),
          .offset = given.value<float>("offset")};
}

std::shared_ptr<HyperConnection> make_hyper_connection(BlockArguments given) {
  const StreamMix mix = stream_mix_of(given, 2);
  const int over = given.at_least(1, "over");
  const auto magnitude = given.value<float>("magnitude");
  return given.own(HyperConnection(given.pool().kernels(), given.pool(), mix, magnitude, over));
}

std::shared_ptr<StreamHead> make_stream_head(BlockArguments given) {
  const StreamMix mix = stream_mix_of(given, 1);
  return given.own(StreamHead(given.pool().kernels(), given.pool(), mix));
}

}  // namespace

void bind_residuals(pybind11::module_& m) {
  bind_block<PostNorm>(m, "PostNorm", "Norm of the sum of the blocks before it.", &make_post_norm);
  bind_block<HyperConnection>(m, "HyperConnection",
                              "Joins the blocks before it with several residual streams.",
                              &make_hyper_connection);
  bind_block<StreamHead>(m, "StreamHead", "The last hidden state, from several residual streams.",
                         &make_stream_head);
}

}  // namespace twofold::bindings
