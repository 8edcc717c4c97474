// Routing, rotation, both attentions on the SIMT machine against scalar references in double precision.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "dense_layer.h"
#include "mla_lanes.h"
#include "mla_layer.h"
#include "watched_run.h"

using namespace twofold::cuda;
using test::WatchedRun;
using twofold::kernels::GroupScore;
using twofold::kernels::RouterScore;
using twofold::kernels::RouterShape;

namespace {

void near(double ours, double expected, double room, const char* what) {
  if (!(std::abs(ours - expected) <= room))
    test::fail(what, 0, std::to_string(ours) + " instead of " + std::to_string(expected));
}

double capped(double score, float softcap) {
  return softcap > 0 ? double(softcap) * std::tanh(score / double(softcap)) : score;
}

// ids and weights of one token.
std::pair<std::vector<int>, std::vector<double>> routed(const float* logits, const float* bias, int experts,
                                                        const RouterShape& shape) {
  std::vector<double> score(static_cast<size_t>(experts)), choice(static_cast<size_t>(experts));
  double most = -INFINITY, sum = 0;
  for (int e = 0; e < experts; ++e) most = std::max(most, double(logits[e]));
  for (int e = 0; e < experts; ++e) sum += std::exp(logits[e] - most);
  for (int e = 0; e < experts; ++e) {
    const double x = logits[e];
    score[size_t(e)] = shape.score == RouterScore::kSoftmax        ? std::exp(x - most) / sum
                       : shape.score == RouterScore::kSigmoid      ? 1 / (1 + std::exp(-x))
                       : shape.score == RouterScore::kSqrtSoftplus ? std::sqrt(std::log1p(std::exp(x)))
                                                                   : x;
    choice[size_t(e)] = score[size_t(e)] + (bias != nullptr ? bias[e] : 0.0f);
  }
  if (shape.top_groups < shape.num_groups) {
    const int size = experts / shape.num_groups;
    std::vector<std::pair<double, int>> groups;
    for (int g = 0; g < shape.num_groups; ++g) {
      std::vector<double> own(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(own.rbegin(), own.rend());
      const bool two = shape.group_score == GroupScore::kTopTwoSum && size > 1;
      groups.emplace_back(-(two ? own[0] + own[1] : own[0]), g);
    }
    std::sort(groups.begin(), groups.end());
    for (size_t i = size_t(shape.top_groups); i < groups.size(); ++i)
      std::fill_n(choice.begin() + groups[i].second * size, size, -INFINITY);
  }
  std::vector<int> order(static_cast<size_t>(experts)), ids;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return choice[size_t(a)] > choice[size_t(b)]; });
  std::vector<double> weights;
  double chosen = 0;
  for (int k = 0; k < shape.top_k; ++k) {
    ids.push_back(order[size_t(k)]);
    weights.push_back(score[size_t(ids.back())]);
  }
  if (shape.score == RouterScore::kSoftmaxOfChosen) {
    const double top = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (double& w : weights) total += w = std::exp(w - top);
    for (double& w : weights) w /= total;
  }
  for (const double w : weights) chosen += w;
  for (double& w : weights) w *= shape.renormalise ? shape.scale / (chosen + 1e-20) : shape.scale;
  return {ids, weights};
}

struct RouteCase {
  int tokens, experts;
  RouterShape shape;
  bool biased;
};

void check_route(const RouteCase& c) {
  const std::vector<float> logits = test::random_floats(size_t(c.tokens * c.experts), 3);
  const std::vector<float> bias = test::random_floats(size_t(c.experts), 4, 0.1f);
  test::under_schedules([&](WatchedRun& run) {
    auto* ids = run.memory<int32_t>("ids", size_t(c.tokens * c.shape.top_k));
    auto* weights = run.memory<float>("routing weights", size_t(c.tokens * c.shape.top_k));
    run.check(launch_route(run.copy("logits", logits), c.biased ? run.copy("bias", bias) : nullptr, c.tokens,
                           c.experts, c.shape, ids, weights, nullptr),
              "route");
    for (int t = 0; t < c.tokens; ++t) {
      const auto [wanted, factors] =
          routed(logits.data() + t * c.experts, c.biased ? bias.data() : nullptr, c.experts, c.shape);
      for (int k = 0; k < c.shape.top_k; ++k) {
        CHECK_EQUAL(ids[t * c.shape.top_k + k], wanted[size_t(k)]);
        near(weights[t * c.shape.top_k + k], factors[size_t(k)], 1e-5 * (1 + std::abs(factors[size_t(k)])),
             "route");
      }
    }
  });
}

// Lists of positions for sequences of these lengths: about a third of them, or all of a sequence that has at most `most`.
struct Chosen {
  std::vector<std::vector<int>> lists;
  std::vector<int32_t> positions, counts;
  int most, lists_of_query;

  Chosen(const std::vector<int32_t>& lengths, int most_, int lists_ = 1)
      : most(most_), lists_of_query(lists_) {
    std::mt19937 random(5);
    for (size_t row = 0; row < lengths.size() * size_t(lists_of_query); ++row) {
      const int length = lengths[row / size_t(lists_of_query)];
      std::vector<int> list(static_cast<size_t>(length));
      std::iota(list.begin(), list.end(), 0);
      if (length > most) {
        std::shuffle(list.begin(), list.end(), random);
        list.resize(std::min(size_t(most), size_t(length) / 3));
        std::sort(list.begin(), list.end());
      }
      counts.push_back(length > 0 ? int32_t(list.size())
                                  : 7);  // a sequence without positions has no list either
      lists.push_back(list);
      list.resize(size_t(most), -1);
      positions.insert(positions.end(), list.begin(), list.end());
    }
  }
  twofold::kernels::PositionLists in(WatchedRun& run) const {
    return {run.copy("chosen positions", positions), run.copy("counts", counts), most, lists_of_query};
  }
  const std::vector<int>* of(int sequence, int head, int num_heads) const {
    if (most == 0) return nullptr;
    return &lists[size_t(sequence * lists_of_query + head * lists_of_query / num_heads)];
  }
};

// The positions that the last token of a sequence attends to, from `first` on.
std::vector<int> attended_to(const std::vector<int>* list, int length, int first) {
  std::vector<int> found;
  for (int p = first; p < length; ++p) {
    if (list == nullptr || std::binary_search(list->begin(), list->end(), p)) found.push_back(p);
  }
  return found;
}

struct AttentionCase {
  int head_dim, heads, kv_heads, rotary, window;
  bool norms, sinks;
  int chunk = 0;
  bool v_norm = false;
  float softcap = 0;
  int most = 0;   // positions that are chosen for a query; 0: all
  int lists = 1;  // lists per query
};

void check_attention(const AttentionCase& c) {
  const std::vector<int32_t> lengths{1, 17, 0, c.most > 0 ? 1049 : 259, 70};
  const Chosen chosen(lengths, c.most, c.lists);
  const int S = int(lengths.size()), D = c.head_dim, page_size = 16, max_pages = c.most > 0 ? 66 : 17,
            heads = c.heads + 2 * c.kv_heads;
  const int pages = S * max_pages, row = c.kv_heads * D;
  std::vector<int32_t> tables(static_cast<size_t>(pages));
  std::iota(tables.begin(), tables.end(), 0);
  std::shuffle(tables.begin(), tables.end(), std::mt19937(8));
  const auto slot = [&](int s, int position) {
    return int64_t(tables[size_t(s * max_pages + position / page_size)]) * page_size + position % page_size;
  };
  const auto keys = test::random_bf16(size_t(pages * page_size * row), 1),
             values = test::random_bf16(keys.size(), 2);
  const auto qkv = test::random_bf16(size_t(S * heads * D), 3);
  const auto q_norm = test::random_floats(size_t(D), 4), k_norm = test::random_floats(size_t(D), 5),
             v_norm = test::random_floats(size_t(D), 8);
  std::vector<float> cos, sin;
  for (const float angle : test::random_floats(size_t(S * c.rotary / 2), 6, 3)) {
    cos.push_back(std::cos(angle));
    sin.push_back(std::sin(angle));
  }
  const auto sinks = test::random_floats(size_t(c.heads), 7);
  std::vector<int64_t> places;
  for (int s = 0; s < S; ++s) places.push_back(lengths[size_t(s)] > 0 ? slot(s, lengths[size_t(s)] - 1) : -1);
  test::under_schedules([&](WatchedRun& run) {
    auto* cached_keys = run.copy("keys", keys);
    auto* cached_values = run.copy("values", values);
    const KvPages kv{cached_keys, cached_values, page_size, c.kv_heads, D};
    auto* q = run.memory<uint16_t>("q", size_t(S * c.heads * D));
    const QkvRows rows{run.copy("qkv", qkv),
                       S,
                       c.heads,
                       c.norms ? run.copy("q_norm", q_norm) : nullptr,
                       c.norms ? run.copy("k_norm", k_norm) : nullptr,
                       1e-6f,
                       c.rotary > 0 ? run.copy("cos", cos) : nullptr,
                       c.rotary > 0 ? run.copy("sin", sin) : nullptr,
                       c.rotary,
                       run.copy("places", places),
                       c.v_norm ? run.copy("v_norm", v_norm) : nullptr};
    run.check(launch_rope_store(rows, kv, q, nullptr), "rope_store");
    for (int s = 0; s < S; ++s) {
      for (int head = 0; head < heads; ++head) {
        const bool is_query = head < c.heads, is_value = head >= c.heads + c.kv_heads;
        if (!is_query && places[size_t(s)] < 0) continue;
        std::vector<double> x;
        for (int d = 0; d < D; ++d) x.push_back(test::float_of_bf16(qkv[size_t((s * heads + head) * D + d)]));
        if (is_value ? c.v_norm : c.norms) {
          const auto& norm = is_value ? v_norm : is_query ? q_norm : k_norm;
          double squares = 0;
          for (const double v : x) squares += v * v;
          for (int d = 0; d < D; ++d) x[size_t(d)] *= double(norm[size_t(d)]) / std::sqrt(squares / D + 1e-6);
        }
        for (int d = 0; d < c.rotary / 2 && !is_value; ++d) {
          const double a = x[size_t(d)], b = x[size_t(d + c.rotary / 2)];
          const double cs = cos[size_t(s * c.rotary / 2 + d)], sn = sin[size_t(s * c.rotary / 2 + d)];
          x[size_t(d)] = a * cs - b * sn;
          x[size_t(d + c.rotary / 2)] = b * cs + a * sn;
        }
        const uint16_t* ours = is_query ? q + (s * c.heads + head) * D
                                        : (is_value ? cached_values : cached_keys) + places[size_t(s)] * row +
                                              (head - c.heads) % c.kv_heads * D;
        for (int d = 0; d < D; ++d)
          near(test::float_of_bf16(ours[d]), x[size_t(d)], std::abs(x[size_t(d)]) / 250 + 1e-5, "rope_store");
      }
    }
    const float scale = 1.0f / std::sqrt(float(D));
    const int max_length = c.most > 0 ? 1050 : 260;
    auto* workspace =
        run.memory<float>("workspace", size_t(attention_workspace_bytes(S, c.heads, D, max_length) / 4));
    auto* out = run.memory<uint16_t>("attention", size_t(S * c.heads * D));
    const DecodeAttention attention{q,
                                    run.copy("tables", tables),
                                    run.copy("lengths", lengths),
                                    S,
                                    c.heads,
                                    max_pages,
                                    max_length,
                                    {.scale = scale, .softcap = c.softcap},
                                    {.window = c.window, .chunk = c.chunk},
                                    c.sinks ? run.copy("sinks", sinks) : nullptr,
                                    c.most > 0 ? chosen.in(run) : twofold::kernels::PositionLists{}};
    // Splits without positions leave their part alone; so the rest of it is not compared.
    std::memset(workspace, 0, size_t(attention_workspace_bytes(S, c.heads, D, max_length)));
    run.check(launch_decode_attention(attention, kv, workspace, out, nullptr), "decode_attention");
    for (int s = 0; s < S; ++s) {
      for (int head = 0; head < c.heads; ++head) {
        const int kv_head = head / (c.heads / c.kv_heads), length = lengths[size_t(s)];
        int first = c.window > 0 ? std::max(0, length - c.window) : 0;
        if (c.chunk > 0 && length > 0) first = (length - 1) / c.chunk * c.chunk;
        const auto seen = attended_to(chosen.of(s, head, c.heads), length, length > 0 ? first : 0);
        std::vector<double> scores;
        double most = c.sinks ? double(sinks[size_t(head)]) : -INFINITY, total = 0;
        const auto at = [&](const uint16_t* cache, int position, int d) {
          return double(test::float_of_bf16(cache[slot(s, position) * row + kv_head * D + d]));
        };
        for (const int p : seen) {
          double score = 0;
          for (int d = 0; d < D; ++d)
            score += double(test::float_of_bf16(q[(s * c.heads + head) * D + d])) * at(cached_keys, p, d);
          scores.push_back(capped(score * double(scale), c.softcap));
          most = std::max(most, scores.back());
        }
        if (c.sinks) total = std::exp(double(sinks[size_t(head)]) - most);
        for (double& score : scores) total += score = std::exp(score - most);
        for (int d = 0; d < D; ++d) {
          double value = 0;
          for (size_t i = 0; i < seen.size(); ++i) value += scores[i] * at(cached_values, seen[i], d);
          const double expected = seen.empty() ? 0 : value / total;
          near(test::float_of_bf16(out[(s * c.heads + head) * D + d]), expected,
               std::abs(expected) / 250 + 1e-4, "decode_attention");
        }
      }
    }
  });
}

struct MlaCase {
  int heads, latent, rope;
  bool neighbours;
  int window = 0;
  float softcap = 0;
  int most = 0;
  bool rotates = true;
  bool sinks = false;
};

void check_mla(const MlaCase& c) {
  const std::vector<int32_t> lengths{1, 0, c.most > 0 ? 860 : 258, 33};
  const Chosen chosen(lengths, c.most);
  const int S = int(lengths.size()), page_size = 8, max_pages = c.most > 0 ? 108 : 33,
            cached = c.latent + c.rope, nope = 5;
  const int stride = cached + 3, half = c.rope / 2;
  std::vector<int32_t> tables(static_cast<size_t>(S * max_pages));
  std::iota(tables.rbegin(), tables.rend(), 0);
  const auto slot = [&](int s, int position) {
    return int64_t(tables[size_t(s * max_pages + position / page_size)]) * page_size + position % page_size;
  };
  std::vector<int64_t> places;
  for (int s = 0; s < S; ++s) places.push_back(lengths[size_t(s)] > 0 ? slot(s, lengths[size_t(s)] - 1) : -1);
  const auto cache = test::random_bf16(size_t(S * max_pages * page_size * cached), 1);
  const auto compressed = test::random_bf16(size_t(S * stride), 2);
  const auto queries = test::random_bf16(size_t(S * c.heads * (nope + c.rope)), 3);
  const auto absorbed_before = test::random_bf16(size_t(S * c.heads * cached), 4);
  const auto norm = test::random_floats(size_t(c.latent), 5), sinks = test::random_floats(size_t(c.heads), 8);
  const auto cos = test::random_floats(size_t(S * half), 6), sin = test::random_floats(size_t(S * half), 7);
  test::under_schedules([&](WatchedRun& run) {
    auto* rows = run.copy("latents", cache);
    auto* absorbed = run.copy("absorbed", absorbed_before);
    const MlaPages pages{rows, page_size, c.latent, c.rope};
    const MlaRows given{run.copy("compressed", compressed),
                        stride,
                        run.copy("queries", queries),
                        S,
                        c.heads,
                        nope,
                        run.copy("norm", norm),
                        1e-6f,
                        c.rotates ? run.copy("cos", cos) : nullptr,
                        c.rotates ? run.copy("sin", sin) : nullptr,
                        c.neighbours,
                        run.copy("slot_mapping", places)};
    run.check(launch_mla_store(given, pages, absorbed, nullptr), "mla_store");
    const auto check_rotated = [&](const uint16_t* from, const uint16_t* ours, int s) {
      if (!c.rotates) {
        CHECK(std::equal(from, from + c.rope, ours));
        return;
      }
      for (int i = 0; i < half; ++i) {
        const double a = test::float_of_bf16(from[c.neighbours ? 2 * i : i]);
        const double b = test::float_of_bf16(from[c.neighbours ? 2 * i + 1 : half + i]);
        const double cs = cos[size_t(s * half + i)], sn = sin[size_t(s * half + i)];
        near(test::float_of_bf16(ours[i]), a * cs - b * sn,
             0.02 * (std::abs(a * cs) + std::abs(b * sn)) + 1e-5, "rotate");
        near(test::float_of_bf16(ours[half + i]), b * cs + a * sn,
             0.02 * (std::abs(b * cs) + std::abs(a * sn)) + 1e-5, "rotate");
      }
    };
    for (int s = 0; s < S; ++s) {
      for (int head = 0; head < c.heads; ++head) {
        check_rotated(queries.data() + (s * c.heads + head) * (nope + c.rope) + nope,
                      absorbed + (s * c.heads + head) * cached + c.latent, s);
      }
      if (places[size_t(s)] < 0) continue;
      const uint16_t* from = compressed.data() + s * stride;
      const uint16_t* ours = rows + places[size_t(s)] * cached;
      double squares = 0;
      for (int i = 0; i < c.latent; ++i) squares += std::pow(double(test::float_of_bf16(from[i])), 2);
      for (int i = 0; i < c.latent; ++i) {
        const double expected = double(test::float_of_bf16(from[i])) * double(norm[size_t(i)]) /
                                std::sqrt(squares / c.latent + 1e-6);
        near(test::float_of_bf16(ours[i]), expected, std::abs(expected) / 250 + 1e-6, "normalise");
      }
      check_rotated(from + c.latent, ours + c.latent, s);
    }
    const float scale = 0.1f;
    const int max_length = c.most > 0 ? 861 : 260;
    const size_t bytes = size_t(mla_workspace_bytes(S, c.heads, c.latent, max_length));
    auto* workspace = run.memory<float>("workspace", bytes / 4);
    std::memset(workspace, 0, bytes);
    auto* out = run.memory<uint16_t>("latent means", size_t(S * c.heads * c.latent));
    run.check(launch_mla_decode({absorbed,
                                 run.copy("tables", tables),
                                 run.copy("lengths", lengths),
                                 S,
                                 c.heads,
                                 max_pages,
                                 max_length,
                                 {.scale = scale, .softcap = c.softcap},
                                 {.window = c.window},
                                 c.sinks ? run.copy("sinks", sinks) : nullptr,
                                 c.most > 0 ? chosen.in(run) : twofold::kernels::PositionLists{}},
                                pages, workspace, out, nullptr),
              "mla_decode");
    for (int s = 0; s < S; ++s) {
      for (int head = 0; head < c.heads; ++head) {
        const int length = lengths[size_t(s)];
        const int first = c.window > 0 ? std::max(0, length - c.window) : 0;
        const auto seen = attended_to(chosen.of(s, head, c.heads), length, first);
        std::vector<double> weights;
        double most = c.sinks ? double(sinks[size_t(head)]) : -INFINITY;
        for (const int p : seen) {
          double score = 0;
          for (int i = 0; i < cached; ++i)
            score += double(test::float_of_bf16(absorbed[(s * c.heads + head) * cached + i])) *
                     double(test::float_of_bf16(rows[slot(s, p) * cached + i]));
          weights.push_back(capped(score * double(scale), c.softcap));
          most = std::max(most, weights.back());
        }
        double total = c.sinks ? std::exp(double(sinks[size_t(head)]) - most) : 0;
        for (double& weight : weights) total += weight = std::exp(weight - most);
        for (int i = 0; i < c.latent; ++i) {
          double value = 0;
          for (size_t k = 0; k < seen.size(); ++k)
            value += weights[k] * double(test::float_of_bf16(rows[slot(s, seen[k]) * cached + i]));
          const double expected = seen.empty() ? 0 : value / total;
          near(test::float_of_bf16(out[(s * c.heads + head) * c.latent + i]), expected,
               std::abs(expected) / 250 + 1e-4, "mla_decode");
        }
      }
    }
  });
}

}  // namespace

CASE(experts_are_chosen_as_the_scalar_router_chooses) {
  using enum RouterScore;
  for (const RouteCase& c : {
           RouteCase{5, 8, {.top_k = 2, .score = kSoftmax, .renormalise = true}, false},
           RouteCase{3, 67, {.top_k = 8, .score = kSigmoid, .renormalise = true, .scale = 2.5f}, true},
           RouteCase{2, 33, {.top_k = 3, .score = kSqrtSoftplus}, true},
           RouteCase{4, 32, {.top_k = 4, .score = kSoftmaxOfChosen}, false},
           RouteCase{3,
                     64,
                     {.top_k = 6,
                      .score = kSigmoid,
                      .num_groups = 8,
                      .top_groups = 3,
                      .group_score = GroupScore::kTopTwoSum},
                     true},
           RouteCase{6, 120, {.top_k = 5, .score = kSoftmax, .num_groups = 40, .top_groups = 7}, false},
           RouteCase{1, 1024, {.top_k = 10, .score = kSoftmax}, false},
       }) {
    check_route(c);
  }
}

CASE(attention_rotates_stores_and_attends_as_the_scalar_one) {
  for (const AttentionCase& c :
       {AttentionCase{64, 6, 2, 64, 0, false, true}, AttentionCase{128, 9, 1, 64, 100, true, false},
        AttentionCase{256, 2, 2, 256, 0, true, false}, AttentionCase{64, 2, 1, 0, 0, false, false, 48},
        AttentionCase{512, 3, 1, 512, 0, true, false, 0, true},
        AttentionCase{128, 4, 2, 64, 40, true, true, 0, false, 1.5f},
        AttentionCase{64, 6, 2, 64, 0, false, false, 0, false, 0, 300},
        AttentionCase{64, 6, 3, 64, 0, false, true, 0, false, 0, 300, 3},
        AttentionCase{128, 4, 2, 64, 500, true, true, 0, false, 1.5f, 300},
        AttentionCase{64, 2, 1, 0, 0, false, false, 64, false, 0, 20}}) {
    check_attention(c);
  }
}

CASE(latent_attention_stores_and_attends_as_the_scalar_one) {
  check_mla({17, 130, 6, false});
  check_mla({3, 64, 8, true, 30, 0.5f});
  check_mla({.heads = 2, .latent = 514, .rope = 6, .neighbours = false, .most = 270, .sinks = true});
  check_mla({.heads = 17, .latent = 64, .rope = 8, .neighbours = false, .most = 270});
  check_mla({.heads = 5, .latent = 34, .rope = 6, .neighbours = false, .sinks = true});
  check_mla({.heads = 2,
             .latent = 64,
             .rope = 8,
             .neighbours = true,
             .window = 400,
             .softcap = 0.5f,
             .most = 270,
             .rotates = false});
  check_mla({.heads = 2, .latent = 64, .rope = 0, .neighbours = true, .rotates = false});
  for (const int latent : {448, 512, 1024}) {
    check_mla({3, latent, 64, true});
    check_mla({.heads = 9, .latent = latent, .rope = 64, .neighbours = true, .window = 30, .sinks = true});
    check_mla({.heads = 2, .latent = latent, .rope = 64, .neighbours = true, .window = 400, .most = 270});
  }
}

CASE(a_list_of_all_positions_gives_the_bits_of_full_attention) {
  constexpr int kHeads = 3, kDim = 64, kLength = 700, kPage = 16, kPages = 44;
  std::vector<int32_t> tables(kPages), positions(kLength);
  std::iota(tables.rbegin(), tables.rend(), 0);
  std::iota(positions.begin(), positions.end(), 0);
  for (const int window : {0, 300}) {
    WatchedRun run(1);
    auto* cache = run.copy("cache", test::random_bf16(size_t(kPages * kPage * kDim), 1));
    const auto* q = run.copy("q", test::random_bf16(kHeads * kDim, 2));
    const auto* lengths = run.copy("lengths", std::vector<int32_t>{kLength});
    const auto* pages = run.copy("tables", tables);
    const twofold::kernels::PositionLists lists[] = {{},
                                                     {run.copy("positions", positions), lengths, kLength}};
    auto* workspace =
        run.memory<float>("workspace", size_t(attention_workspace_bytes(1, kHeads, kDim, kLength) / 4));
    uint16_t* outs[4];
    for (int i = 0; i < 4; ++i) outs[i] = run.memory<uint16_t>("out", kHeads * kDim);
    for (const int i : {0, 1}) {
      DecodeAttention attention{q,       pages,           lengths,           1, kHeads, kPages,
                                kLength, {.scale = 0.1f}, {.window = window}};
      attention.chosen = lists[i];
      run.check(
          launch_decode_attention(attention, {cache, cache, kPage, 1, kDim}, workspace, outs[i], nullptr),
          "decode_attention");
      run.check(launch_mla_decode({q,
                                   pages,
                                   lengths,
                                   1,
                                   kHeads,
                                   kPages,
                                   kLength,
                                   {.scale = 0.1f},
                                   {.window = window},
                                   nullptr,
                                   lists[i]},
                                  {cache, kPage, kDim, 0}, workspace, outs[2 + i], nullptr),
                "mla_decode");
    }
    CHECK(std::equal(outs[0], outs[0] + kHeads * kDim, outs[1]));
    CHECK(std::equal(outs[2], outs[2] + kHeads * kDim, outs[3]));
  }
}
