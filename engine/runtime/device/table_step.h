// The host's part of a table step: a decode step whose layers the device places itself, from the slot tables
// published at its beginning, and whose misses the CPU pool computes through the mailbox. One thread makes
// these calls, in this order:
//
//   begin     sets the rows and publishes the tables that later work on `compute` reads
//   serve     while the device runs: misses are computed and answered at once; decisions about a layer
//             (uploads, records) follow when the next one is posted, with the time that the device measured.
//             With router lookahead, uploads of experts that the next layer is likely to need begin
//             before the misses are computed, and those that have landed by the answer are reported
//             to the device
//   end       all work of the step has been queued on `compute`: later uploads wait for it
//   confirm   the device has ended the step: whether every answer came in time is known, and the last layer
//             is followed too
//
// A step that is lost (no post in time, a timeout on the device, an abort) or that threw ends with give_up
// instead, once the device is idle. Then another can begin.
#pragma once
#include <chrono>
#include <cstdint>
#include <vector>

#include "device/device_accelerator.h"
#include "device/mailbox.h"
#include "device/mailbox_experts.h"
#include "moe/moe_executor.h"

namespace twofold {

class TableStep {
 public:
  // All of these outlive it. Throws std::invalid_argument where the mailbox is not the model's.
  TableStep(Mailbox& mailbox, MoeExecutor& executor, DeviceAccelerator& accelerator, ThreadPool& pool);

  // The device may hold more rows than are named here: padding rows, routed to no expert, after the named ones.
  void begin(StepRows rows, StreamHandle compute);
  // `number` as the device counts its steps. On anything but kPosted the mailbox is aborted.
  ServedStep serve(uint32_t number, std::chrono::nanoseconds limit);
  void end(StreamHandle compute);
  // On anything but kPosted the step's results are void.
  ServedStep confirm();
  void give_up(StreamHandle compute);

  // Total time of the CPU's experts since the start.
  double cpu_us() const { return cpu_us_; }

 private:
  enum class Stage : uint8_t { kIdle, kBegun, kServed, kEnded };
  void follow(int layer);
  void look_ahead(int layer, const PostedLayer& posted);
  void settle_ahead(int layer);
  // Follows an answered layer while the device continues.
  void compute_deferred(int layer, const PostedLayer& posted);
  // Experts are deferred: the device waits for an answer in every layer, and adds each answer's rows.
  bool joins_every_layer() const { return accelerator_.num_deferred() > 0; }
  // Decodes into where_; throws on an invalid placement of the step's rows.
  void read_placements(int layer, const PostedLayer& posted);
  void expect(Stage stage, const char* call) const;

  Mailbox& mailbox_;
  MoeExecutor& executor_;
  DeviceAccelerator& accelerator_;
  MailboxExperts experts_;
  Stage stage_ = Stage::kIdle;
  bool published_ = false;  // the tables belong to a step whose end is not yet reported
  int num_rows_ = 0;
  bool looks_ahead_ = false;  // in this step, if the device runs its routers ahead
  double cpu_us_ = 0;
  std::vector<double> cpu_us_of_;  // by layer, of the step
  std::vector<Placement> where_;
};

}  // namespace twofold
