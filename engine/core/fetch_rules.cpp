#include "twofold/fetch_rules.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace twofold {
namespace {

constexpr std::pair<const char*, FetchRule> kNames[] = {
    {"best-split", FetchRule::kBestSplit}, {"none", FetchRule::kNone},
    {"min-sum", FetchRule::kMinSum},       {"two-ended", FetchRule::kTwoEnded},
    {"link-share", FetchRule::kLinkShare}, {"all", FetchRule::kAll},
};

std::vector<int> two_ended(const CostModel& cost, std::span<const ExpertLoad> misses, double gpu_us,
                           double backlog_us) {
  std::vector<int> fetch;
  const DeviceCost& home = cost.home();
  double cpu_us = home.profile().handshake_us;
  double link_us = backlog_us;
  for (size_t heavy = 0, light = misses.size(); heavy < light;) {
    const double by_link =
        std::max(link_us + home.upload_us(), gpu_us) + home.gpu_expert_us(misses[heavy].tokens);
    const double by_cpu = cpu_us + cost.cpu_expert_us(misses[light - 1].tokens);
    if (by_cpu <= by_link) {
      cpu_us = by_cpu;
      --light;
    } else {
      link_us += home.upload_us();
      gpu_us = by_link;
      fetch.push_back(misses[heavy++].expert);
    }
  }
  return fetch;
}

}  // namespace

FetchRule fetch_rule_of(const std::string& name) {
  std::string valid;
  for (const auto& [known, rule] : kNames) {
    if (name == known) return rule;
    valid += (valid.empty() ? "" : ", ") + std::string(known);
  }
  throw std::invalid_argument("fetch rule '" + name + "' given, one of " + valid + " expected");
}

const char* name_of(FetchRule rule) {
  return std::find_if(std::begin(kNames), std::end(kNames),
                      [rule](const auto& known) { return known.second == rule; })
      ->first;
}

std::vector<int> peer_fetches(FetchRule rule, const CostModel& cost, std::span<const ExpertLoad> active,
                              double backlog_us) {
  std::vector<ExpertLoad> misses;
  const DeviceCost& home = cost.home();
  double gpu_us = home.profile().gpu_launch_us;
  for (const ExpertLoad& load : active) {
    if (load.resident) {
      gpu_us += home.gpu_expert_us(load.tokens);
    } else {
      misses.push_back(load);
    }
  }
  std::stable_sort(misses.begin(), misses.end(),
                   [](const ExpertLoad& a, const ExpertLoad& b) { return a.tokens > b.tokens; });
  std::vector<int> fetch;
  switch (rule) {
    case FetchRule::kBestSplit:
      throw std::invalid_argument("peer_fetches: best-split is decided by the planners");
    case FetchRule::kNone:
      break;
    case FetchRule::kMinSum:
      for (const ExpertLoad& miss : misses) {
        if (home.upload_us() + home.gpu_expert_us(miss.tokens) < cost.cpu_expert_us(miss.tokens)) {
          fetch.push_back(miss.expert);
        }
      }
      break;
    case FetchRule::kTwoEnded:
      fetch = two_ended(cost, misses, gpu_us, backlog_us);
      break;
    case FetchRule::kAll:
      for (const ExpertLoad& miss : misses) fetch.push_back(miss.expert);
      break;
    case FetchRule::kLinkShare: {
      const double link = home.profile().link_bandwidth_gbps;
      const double share = link / (link + cost.profile().host.cpu_bandwidth_gbps);
      const auto count = static_cast<size_t>(std::lround(share * static_cast<double>(misses.size())));
      for (size_t i = 0; i < count; ++i) fetch.push_back(misses[i].expert);
      break;
    }
  }
  return fetch;
}

}  // namespace twofold
