// One request's changes to its logits before sampling: forbidden tokens, biases, penalties.
#pragma once
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace twofold {

struct TokenRuleSettings {
  float presence_penalty = 0.0f, frequency_penalty = 0.0f, repetition_penalty = 1.0f;
  std::vector<std::pair<int32_t, float>> bias;  // a token and what is added to its logit
  std::vector<std::vector<int32_t>> bad_words;  // the last token may not follow the ones before it
  std::vector<int32_t> withheld;                // forbidden before min_tokens tokens were taken
  int64_t min_tokens = 0;
};

class TokenRules {
 public:
  // (token, the logit it had), in the order of the changes.
  using Changes = std::vector<std::pair<int32_t, float>>;

  TokenRules(TokenRuleSettings settings, std::span<const int32_t> prompt);

  // Takes the next generated token.
  void take(int32_t token);

  // Changes a row of logits in place: forbidden tokens to minus infinity, then biases, then CTRL's repetition
  // penalty on prompt and generated tokens, then OpenAI's penalties on generated tokens. Adds to `changes`.
  // Tokens outside the row are ignored.
  void apply(std::span<float> logits, Changes& changes) const;

  static void undo(std::span<float> logits, Changes& changes);

 private:
  void note(int32_t token, int times);

  TokenRuleSettings settings_;
  bool penalises_;
  size_t longest_prefix_ = 0;
  std::vector<int32_t> tail_;           // the newest tokens, as many as bad words look back on
  std::vector<int32_t> seen_, counts_;  // each token once, and how often it was generated
  std::unordered_map<int32_t, size_t> place_;
  int64_t num_taken_ = 0;
};

}  // namespace twofold
