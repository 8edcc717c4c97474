// After a layer: which of its experts are uploaded to which device's slots. A miss goes where its upload is worth
// most beyond its price. With several devices an expert may also move from one to another, or have copies on
// several: a cache's values are relative to its rent, so copies are weighed by use rates instead, by what each use
// saves over the next 128 events of the layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twofold/devices.h"
#include "twofold/layer_planner.h"

namespace twofold {

class ExpertMarket {
 public:
  ExpertMarket(const CostModel& cost, const LayerSchedulerConfig& config);

  void begin_step();
  // An upload landed: a moved expert leaves the slot it had.
  void landed(Publication& landed, Devices& devices);
  // Learns from the layer's routing, and now and then from its plan: what one more copy would have saved.
  void learn(int layer, const LayerPlanner& planner, bool may_stream, const Devices& devices);
  // Takes slots for what is worth an upload and adds these moves to the decision, for the links' background.
  void admit(Devices& devices, LayerDecision& decision);
  void recalibrate(const CostModel& cost) { cost_ = cost; }

 private:
  // An expert's best offer: its upload to this device is worth `gain_us` beyond its price.
  struct Offer {
    int device = -1;
    double gain_us = 0;
    bool is_copy = false;  // other devices keep it
    int dropped = -1;      // cell of a copy that leaves its slot for it; -1: none
  };
  struct Device {
    double balance_us = 0;           // saving per use of an expert that another device has too
    int cheapest_copy = -1;          // cell of such an expert, the least worth its slot here; -1: none
    bool has_cheapest_copy = false;  // cheapest_copy is this step's
  };
  size_t cell_of(int layer, int expert) const {
    return size_t(layer) * size_t(num_experts_) + size_t(expert);
  }
  Offer best_offer(int layer, const ExpertDecision& e, Devices& devices);
  bool take(int layer, int expert, const Offer& offer, Devices& devices, LayerDecision& decision);
  void note_refusal(int layer, int expert, Devices& devices, LayerDecision& decision);
  // The least used expert here that another device has too; none that the layer routes to, which may run now.
  int cheapest_copy(int device, int layer, const Devices& devices);
  // What an expert in a slot of this device saves in the layer's next events: misses, or as a copy the balance.
  double saved_us(int device, size_t cell, bool is_copy) const;
  double worth_us(int device, double value) const { return value * cost_.device(device).miss_us(); }

  CostModel cost_;
  int num_experts_, max_waiting_;
  bool is_open_, moves_;  // uploads after layers; experts change slots at all
  bool ranks_;            // values only rank, they have no price
  std::vector<Device> devices_;
  std::vector<uint8_t> copied_;  // [layers * experts]: several devices may have it
  int num_copied_ = 0;
  std::vector<float> use_rate_;  // [layers * experts]: moving average of uses per event of the layer
  int64_t num_planned_ = 0;
};

// Fills free slots at start from usage [layers * experts] (empty: lowest numbers first): each layer's experts go to
// the device that its use keeps busy least.
void preload_by_usage(const LayerPlanner& planner, std::span<const double> usage, Devices& devices);

}  // namespace twofold
