// Parts of attention from their arguments: one function per part, which any block that has the part calls.
#pragma once
#include "blocks/block_arguments.h"
#include "ops/attention/parts/norms.h"
#include "ops/attention/parts/output_gate.h"
#include "ops/attention/parts/projection.h"
#include "ops/attention/parts/query_scale.h"
#include "ops/attention/parts/rotation.h"
#include "ops/attention/parts/scores.h"
#include "ops/attention/parts/selection.h"

namespace twofold::bindings {

// {weight, bias, norm, eps, doubled}; kAny: any size.
Projection projection_of(BlockArguments& given, const char* name, int64_t rows, int64_t columns);
// {weight, eps}.
Norm norm_of(BlockArguments& given, const char* name, int64_t size);
// {index, neighbours}; None: heads carry no positions.
Rotation rotation_of(BlockArguments& given, const char* name = "rotation");
// {period, slope, shift, elements, slopes, bases}; None: queries are not scaled.
QueryScale query_scale_of(BlockArguments& given, int64_t num_heads, int64_t head_dim);
// {stretch, most, chooser}; None: all positions.
Selection selection_of(BlockArguments& given);
// {rule, sinks}.
Scores scores_of(BlockArguments& given, int64_t num_heads);
// Activation of an output gate, by its name.
OutputGate::Kind gate_kind_of(BlockArguments& gate);

}  // namespace twofold::bindings
