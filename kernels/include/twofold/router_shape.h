// How a router turns logits into chosen experts and weights; shared by the CPU's and the device's router.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace twofold::kernels {

enum class RouterScore : uint8_t {
  kSoftmax,  // over all experts
  kSigmoid,
  kSqrtSoftplus,     // sqrt(log(1 + exp(logit)))
  kSoftmaxOfChosen,  // chosen by logit; weights are the softmax over the chosen alone
};
// What a group of experts is chosen by: of its experts' scores, each with its bias.
enum class GroupScore : uint8_t { kMax, kTopTwoSum };

struct RouterShape {
  int top_k = 1;
  RouterScore score = RouterScore::kSoftmax;
  int num_groups = 1;  // of neighbouring experts, all of one size
  int top_groups = 1;  // experts are chosen in so many of them
  GroupScore group_score = GroupScore::kMax;
  bool zero_others =
      false;  // experts of other groups are chosen by a score of 0, instead of not at all (A.X-K2)
  bool renormalise = false;  // a token's weights are divided by their sum + 1e-20
  float scale = 1.0f;        // and multiplied by this
};

// By the names that the bindings know; throw std::invalid_argument for another.
inline RouterScore router_score_named(const std::string& name) {
  if (name == "softmax") return RouterScore::kSoftmax;
  if (name == "sigmoid") return RouterScore::kSigmoid;
  if (name == "sqrt_softplus") return RouterScore::kSqrtSoftplus;
  if (name == "softmax_of_chosen") return RouterScore::kSoftmaxOfChosen;
  throw std::invalid_argument("RouterShape: score is \"" + name +
                              "\"; expected softmax, sigmoid, sqrt_softplus or softmax_of_chosen");
}
inline GroupScore group_score_named(const std::string& name) {
  if (name == "max") return GroupScore::kMax;
  if (name == "top_two_sum") return GroupScore::kTopTwoSum;
  throw std::invalid_argument("RouterShape: group_score is \"" + name + "\"; expected max or top_two_sum");
}

}  // namespace twofold::kernels
