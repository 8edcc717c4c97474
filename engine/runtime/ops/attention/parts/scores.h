// Attend: from products of queries and keys to the weights of values.
#pragma once
#include "twofold/attention_parts.h"

namespace twofold {

struct Scores {
  kernels::ScoreRule rule;
  // [heads] logits that take part in a head's softmax and have no value; null: none. Not owned.
  const float* sinks = nullptr;
};

}  // namespace twofold
