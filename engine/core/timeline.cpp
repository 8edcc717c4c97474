#include "twofold/timeline.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "twofold/reject.h"

namespace twofold {

Timeline::Timeline(double upload_us) : upload_us_(upload_us) {
  if (!(std::isfinite(upload_us) && upload_us > 0)) {
    reject("Timeline: upload_us", upload_us, "a finite time > 0");
  }
}

double Timeline::backlog_us() const { return std::max(0.0, link_free_us_ - now_us_); }

double Timeline::queued_us() const {
  return backlog_us() + upload_us_ * static_cast<double>(waiting_.size());
}

Upload Timeline::upload(const Transfer& what, UploadLane lane, double duration_us) {
  if (lane == UploadLane::kBackground) return waiting_.emplace_back(Upload{what, lane, now_us_});
  const double begin = std::max(now_us_, link_free_us_);
  const Upload upload{what, lane, now_us_, begin, begin + (duration_us < 0 ? upload_us_ : duration_us)};
  link_free_us_ = upload.end_us;
  begun_.push_back(upload);
  return upload;
}

bool Timeline::cancel_background(int slot) {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                  [slot](const Upload& upload) { return upload.what.slot == slot; });
  if (found == waiting_.end()) return false;
  waiting_.erase(found);
  return true;
}

void Timeline::start_waiting(double until_us) {
  while (!waiting_.empty()) {
    Upload upload = waiting_.front();
    const double begin = std::max(upload.queued_us, link_free_us_);
    if (begin >= until_us) return;
    waiting_.pop_front();
    upload.begin_us = begin;
    upload.end_us = begin + upload_us_;
    link_free_us_ = upload.end_us;
    begun_.push_back(upload);
  }
}

void Timeline::advance(double us) {
  if (!(us >= 0)) reject("Timeline: advance by us", us, ">= 0");
  start_waiting(now_us_ + us);
  now_us_ += us;
}

std::vector<Upload> Timeline::take_landed() {
  std::vector<Upload> landed;
  while (!begun_.empty() && begun_.front().end_us <= now_us_) {
    landed.push_back(begun_.front());
    begun_.pop_front();
  }
  return landed;
}

std::optional<Upload> Timeline::take_if_landed(const Transfer& what) {
  const auto found = std::find_if(begun_.begin(), begun_.end(), [this, &what](const Upload& upload) {
    return upload.what == what && upload.end_us <= now_us_;
  });
  if (found == begun_.end()) return std::nullopt;
  const Upload upload = *found;
  begun_.erase(found);
  return upload;
}

void Timeline::drain() {
  // By the uploads' own ends, not by their sum: rounding must leave none of them under way.
  start_waiting(std::numeric_limits<double>::infinity());
  now_us_ = std::max(now_us_, link_free_us_);
}

}  // namespace twofold
