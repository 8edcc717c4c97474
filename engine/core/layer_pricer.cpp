#include "twofold/layer_pricer.h"

#include <algorithm>

namespace twofold {

const LayerWork& LayerPricer::work_of(const LayerDecision& decision, std::span<const DeviceShare> shares,
                                      std::span<const int> deferred_tokens, const Devices& devices,
                                      double cpu_backlog_us) {
  for (Loads& loads : devices_) loads.hits.clear();
  cpu_.clear();
  deferred_.clear();
  for (size_t i = 0; i < decision.experts.size(); ++i) {
    const ExpertDecision& e = decision.experts[i];
    if (e.where == Placement::kHit || e.landed) devices_[size_t(e.device)].hits.push_back(e.tokens);
    if (e.where != Placement::kCpu) continue;
    const int later = deferred_tokens.empty() ? 0 : deferred_tokens[i];
    if (later > 0) deferred_.push_back(later);
    if (e.tokens > later) cpu_.push_back(e.tokens - later);
  }
  work_of_devices_.clear();
  for (int d = 0; d < devices.count(); ++d) {
    const DeviceShare& share = shares[size_t(d)];
    const Link& link = devices.link(d);
    Loads& loads = devices_[size_t(d)];
    loads.fetched.clear();
    // In the link's order: uploads begun ahead come first. They are in its backlog too, where they are not counted.
    for (const auto* experts : {&share.begun, &share.fetch}) {
      for (int i : *experts) loads.fetched.push_back(decision.experts[size_t(i)].tokens);
    }
    const double begun_us = static_cast<double>(share.begun.size()) * link.upload_us();
    work_of_devices_.push_back({loads.hits, loads.fetched, std::max(0.0, link.backlog_us() - begun_us),
                                std::max(0.0, link.queued_us() - begun_us), share.one_transfer});
  }
  work_ = {work_of_devices_, cpu_, deferred_, cpu_backlog_us};
  return work_;
}

}  // namespace twofold
