#include "twofold/slot_placer.h"

#include <algorithm>

namespace twofold {

namespace {

// Whether that slot holds, or will hold, an expert of this layer.
bool in_use(const LayerDecision& decision, int device, int slot) {
  return std::any_of(decision.experts.begin(), decision.experts.end(),
                     [&](const ExpertDecision& e) { return e.slot == slot && e.device == device; });
}

}  // namespace

bool SlotPlacer::keeps(const LayerDecision& decision, const Move& move, const Devices& devices,
                       const std::optional<Admission>& possible) const {
  if (never_keeps_ || !possible || devices.holds(decision.layer, move.expert, move.device)) return false;
  return always_keeps_ || possible->evicted < 0 || possible->value > possible->victim_value;
}

void SlotPlacer::place(std::span<const DeviceShare> shares, Devices& devices, DynamicUpdate& update,
                       LayerDecision& decision) const {
  for (int d = 0; d < devices.count(); ++d) {
    ExpertCache& cache = devices.cache(d);
    int staged = devices.num_slots(d) - 1;
    for (int i : shares[size_t(d)].fetch) {
      ExpertDecision& e = decision.experts[size_t(i)];
      Move move;
      move.layer = decision.layer;
      move.expert = e.expert;
      move.device = d;
      const auto possible = cache.can_admit(move.layer, e.expert, true);
      auto admission = update.admit(move.layer, e.expert, d, devices);
      if (!admission && keeps(decision, move, devices, possible))
        admission = cache.admit(move.layer, e.expert, true);
      if (admission) {
        move.take(*admission);
      } else {
        do {
          ++staged;
        } while (in_use(decision, d, staged));
        move.slot = staged;
        move.staged = true;
        move.value = possible ? possible->value : 0;
        move.victim_value = possible ? possible->victim_value : 0;
      }
      e.where = Placement::kFetched;
      e.slot = move.slot;
      e.device = d;
      decision.moves.push_back(move);
    }
  }
}

void SlotPlacer::upload(std::span<const DeviceShare> shares, const CostModel& cost, Devices& devices,
                        LayerDecision& decision) const {
  int last_device = -1;  // moves are in the order of devices
  for (Move& move : decision.moves) {
    // One transfer pays the link's latency once; its later parts occupy the link for their bytes only.
    const DeviceCost& device = cost.device(move.device);
    const bool continues = shares[size_t(move.device)].one_transfer && move.device == last_device;
    devices.upload(move,
                   continues ? device.upload_us() - device.profile().link_latency_us : device.upload_us());
    last_device = move.device;
  }
}

}  // namespace twofold
