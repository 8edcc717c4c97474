#include "blocks/attention_parts.h"

#include <memory>
#include <string>

namespace twofold::bindings {

Projection projection_of(BlockArguments& given, const char* name, int64_t rows, int64_t columns) {
  return given.part(name, [&](BlockArguments& part) {
    const PackedMatrix& weight = part.packed("weight", rows, columns);
    Projection made{.weight = &weight, .bias = part.optional_vector("bias", weight.rows())};
    made.doubled = part.value("doubled", false);
    if (made.doubled && weight.columns() % 2 != 0) {
      throw part.failure("weight has " + std::to_string(weight.columns()) +
                         " columns; expected an even number with doubled");
    }
    made.norm = part.optional_vector("norm", weight.columns() / (made.doubled ? 2 : 1));
    if (made.norm != nullptr) made.eps = part.value<float>("eps");
    if (made.doubled && made.norm == nullptr)
      throw part.failure("doubled is given without a norm; expected both or none");
    return made;
  });
}

Norm norm_of(BlockArguments& given, const char* name, int64_t size) {
  if (!given.has(name)) return {};
  return given.part(name, [&](BlockArguments& part) {
    return Norm{.weight = part.vector("weight", size),
                .eps = part.value<float>("eps"),
                .bias = part.optional_vector("bias", size)};
  });
}

Rotation rotation_of(BlockArguments& given, const char* name) {
  if (!given.has(name)) return {.positions = false};
  return given.part(name, [](BlockArguments& part) {
    return Rotation{.index = part.has("index") ? part.at_least(0, "index") : 0,
                    .neighbours = part.value("neighbours", false)};
  });
}

QueryScale query_scale_of(BlockArguments& given, int64_t num_heads, int64_t head_dim) {
  if (!given.has("scale")) return {};
  return given.part("scale", [&](BlockArguments& part) {
    QueryScale scale{.period = part.value("period", 0.0f),
                     .slope = part.value("slope", 0.0f),
                     .shift = part.has("shift") ? part.at_least(0, "shift") : 1,
                     .elements = part.optional_vector("elements", head_dim),
                     .slopes = part.optional_vector("slopes", num_heads),
                     .bases = part.optional_vector("bases", num_heads)};
    if ((scale.slopes == nullptr) != (scale.bases == nullptr))
      throw part.failure("slopes or bases are missing; expected both or none");
    return scale;
  });
}

Selection selection_of(BlockArguments& given) {
  if (!given.has("select")) return {};
  return given.part("select", [](BlockArguments& part) {
    Selection select;
    if (part.has("stretch")) select.stretch = part.value<kernels::Stretch>("stretch");
    if (part.has("most")) select.most = part.at_least(1, "most");
    select.bidirectional = part.value("bidirectional", false);
    if (part.has("chooser")) select.chooser = part.value<std::shared_ptr<Chooser>>("chooser");
    if (select.chooser != nullptr && select.most == 0)
      throw part.failure("chooser is given without most; expected both or none");
    return select;
  });
}

Scores scores_of(BlockArguments& given, int64_t num_heads) {
  return given.part("scores", [&](BlockArguments& part) {
    return Scores{.rule = part.value<kernels::ScoreRule>("rule"),
                  .sinks = part.optional_vector("sinks", num_heads)};
  });
}

OutputGate::Kind gate_kind_of(BlockArguments& gate) {
  const auto name = gate.value<std::string>("activation");
  if (name == "sigmoid") return OutputGate::Kind::kSigmoid;
  if (name == "softplus") return OutputGate::Kind::kSoftplus;
  if (name == "silu") return OutputGate::Kind::kSilu;
  throw gate.failure("activation is \"" + name + "\"; expected sigmoid, softplus or silu");
}

}  // namespace twofold::bindings
