// Blocks between other blocks and the residual stream.
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

// groups: weights of a stream that it has. mixes: whether weights of one stream in another follow.
StreamMix stream_mix_of(BlockArguments& given, int groups, bool mixes = false) {
  const int streams = given.at_least(2, "num_streams");
  const int rows = groups * streams + (mixes ? streams * streams : 0);
  const PackedMatrix& mix = given.packed("mix", rows, kAny);
  if (mix.columns() % streams != 0) {
    throw given.failure("mix has " + std::to_string(mix.columns()) + " columns; expected a multiple of " +
                        std::to_string(streams) + " streams");
  }
  return {.mix = &mix,
          .base = given.vector("base", rows),
          .scale = given.vector("scale", groups + mixes),
          .num_streams = streams,
          .groups = groups,
          .eps = given.value<float>("eps"),
          .offset = given.value<float>("offset")};
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
  StreamWrite write{
      .magnitude = given.value<float>("magnitude"), .offset = 0, .rounds = given.positive_or_zero("rounds")};
  const StreamMix mix = stream_mix_of(given, 2, write.rounds > 0);
  write.offset = given.has("output_offset") ? given.value<float>("output_offset") : mix.offset;
  const int over = given.at_least(1, "over");
  return given.own(HyperConnection(given.pool().kernels(), given.pool(), mix, write, over));
}

std::shared_ptr<StreamHead> make_stream_head(BlockArguments given) {
  const StreamMix mix = stream_mix_of(given, 1);
  return given.own(StreamHead(given.pool().kernels(), given.pool(), mix));
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
