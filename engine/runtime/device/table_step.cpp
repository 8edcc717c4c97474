#include "device/table_step.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {

TableStep::TableStep(Mailbox& mailbox, MoeExecutor& executor, DeviceAccelerator& accelerator,
                     ThreadPool& pool)
    : mailbox_(mailbox),
      executor_(executor),
      accelerator_(accelerator),
      experts_(pool, executor.store(), accelerator.num_deferred()),
      cpu_us_of_(size_t(mailbox.shape().num_layers)) {
  const MailboxShape& shape = mailbox.shape();
  const ExpertStore& store = executor.store();
  if (shape.num_layers != store.num_layers() || shape.hidden != store.shape().hidden) {
    throw std::invalid_argument("a mailbox of " + std::to_string(shape.num_layers) + " layers of width " +
                                std::to_string(shape.hidden) + " was given; the experts' " +
                                std::to_string(store.num_layers()) + " layers of width " +
                                std::to_string(store.shape().hidden) + " were expected");
  }
}

void TableStep::expect(Stage stage, const char* call) const {
  if (stage_ == stage) return;
  throw std::logic_error(std::string("table step: ") + call + " was called out of turn");
}

void TableStep::begin(StepRows rows, StreamHandle compute) {
  expect(Stage::kIdle, "begin");
  if (rows.requests.empty() || rows.requests.size() > size_t(mailbox_.shape().max_tokens)) {
    throw std::invalid_argument("a table step of " + std::to_string(rows.requests.size()) +
                                " rows was given; 1 to " + std::to_string(mailbox_.shape().max_tokens) +
                                " were expected");
  }
  num_rows_ = int(rows.requests.size());
  experts_.begin_step(rows.generated);
  executor_.begin_step(std::move(rows));
  stage_ = Stage::kBegun;
  looks_ahead_ = accelerator_.needs_look_ahead();
  mailbox_.forget_arrivals();
  accelerator_.begin_table_step(compute);
  published_ = true;
}

ServedStep TableStep::serve(uint32_t number, std::chrono::nanoseconds limit) {
  expect(Stage::kBegun, "serve");
  std::fill(cpu_us_of_.begin(), cpu_us_of_.end(), 0.0);
  const int top_k = mailbox_.shape().top_k;
  const auto compute = [&](int layer, const PostedLayer& posted) {
    if (posted.num_on_cpu > 0) look_ahead(layer, posted);
    const auto begin = std::chrono::steady_clock::now();
    experts_.compute(layer, posted, top_k);
    cpu_us_of_[size_t(layer)] =
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    cpu_us_ += cpu_us_of_[size_t(layer)];
  };
  const auto observe = [&](int layer, const PostedLayer& posted) {
    if (posted.num_on_cpu == 0) look_ahead(layer, posted);
    settle_ahead(layer + 1);
    compute_deferred(layer, posted);
    if (layer > 0) follow(layer - 1);
  };
  const ServedStep served = serve_step(mailbox_, number, limit, compute, observe, joins_every_layer());
  if (served.state == PostState::kPosted) stage_ = Stage::kServed;
  return served;
}

void TableStep::end(StreamHandle compute) {
  expect(Stage::kServed, "end");
  published_ = false;
  accelerator_.end_table_step(compute);
  stage_ = Stage::kEnded;
}

void TableStep::compute_deferred(int layer, const PostedLayer& posted) {
  if (!joins_every_layer()) return;
  const auto begin = std::chrono::steady_clock::now();
  experts_.compute_deferred(layer, posted, mailbox_.shape().top_k);
  cpu_us_ += std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

ServedStep TableStep::confirm() {
  expect(Stage::kEnded, "confirm");
  stage_ = Stage::kIdle;
  if (const ServedStep lost = verdict(mailbox_); lost.state != PostState::kPosted) return lost;
  if (mailbox_.shape().num_layers > 0) follow(mailbox_.shape().num_layers - 1);
  executor_.end_step();
  return {};
}

void TableStep::give_up(StreamHandle compute) {
  stage_ = Stage::kIdle;
  mailbox_.reset();
  if (!std::exchange(published_, false)) return;
  accelerator_.end_table_step(compute);
}

void TableStep::look_ahead(int layer, const PostedLayer& posted) {
  if (!looks_ahead_ || posted.ahead == nullptr) return;
  const MailboxShape& shape = mailbox_.shape();
  read_placements(layer, posted);
  accelerator_.look_ahead(layer, {posted.ids, posted.weights, num_rows_, shape.top_k}, where_,
                          {posted.ahead, size_t(num_rows_) * size_t(shape.num_ahead)});
}

void TableStep::settle_ahead(int layer) {
  const MailboxShape& shape = mailbox_.shape();
  if (!looks_ahead_ || shape.num_ahead == 0 || layer >= shape.num_layers) return;
  for (const Publication& landed : accelerator_.settle_ahead(layer))
    mailbox_.arrive(layer, landed.expert, landed.slot);
}

void TableStep::read_placements(int layer, const PostedLayer& posted) {
  const int top_k = mailbox_.shape().top_k;
  if (posted.num_tokens < num_rows_) {
    throw std::runtime_error("the device posted " + std::to_string(posted.num_tokens) + " tokens for layer " +
                             std::to_string(layer) + "; the step's " + std::to_string(num_rows_) +
                             " were expected");
  }
  where_.clear();
  for (int pair = 0; pair < posted.num_tokens * top_k; ++pair) {
    const bool is_row = pair < num_rows_ * top_k;
    if ((posted.where[pair] >= cuda::kPadding) == is_row) {
      throw std::runtime_error("the device placed pair " + std::to_string(pair) + " of layer " +
                               std::to_string(layer) + " as " + std::to_string(posted.where[pair]) +
                               (is_row ? ", which is a token's" : ", which is padding"));
    }
    if (is_row) where_.push_back(Placement(posted.where[pair]));
  }
}

void TableStep::follow(int layer) {
  const PostedLayer posted = mailbox_.posted(layer);
  read_placements(layer, posted);
  const LayerSpan span = mailbox_.span(layer);
  executor_.follow(layer, {posted.ids, posted.weights, num_rows_, mailbox_.shape().top_k}, where_,
                   {span.layer_us, cpu_us_of_[size_t(layer)], span.device_us, span.dense_us});
}

}  // namespace twofold
