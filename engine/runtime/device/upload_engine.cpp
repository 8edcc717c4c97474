#include "device/upload_engine.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace twofold {

UploadEngine::UploadEngine(DeviceApi& api, const SlotPool& slots, const SlotTables& tables, Source source,
                           const UploadSettings& settings)
    : api_(api),
      slots_(slots),
      tables_(tables),
      source_(std::move(source)),
      settings_(settings),
      start_us_(settings.start_us < 0 ? api.now_us() : settings.start_us),
      events_(api),
      stream_(api),
      compute_passed_(events_.take()) {
  if (settings_.source_pinned) return;
  ring_memory_ = PinnedMemory(api, settings_.chunk_bytes * size_t(settings_.num_chunks), "upload chunks");
  for (int i = 0; i < settings_.num_chunks; ++i) {
    ring_.push_back({ring_memory_.data() + size_t(i) * settings_.chunk_bytes, events_.take()});
  }
}

UploadEngine::~UploadEngine() {
  // Slots and the store must not be freed while copies run.
  if (passing_) (void)api_.record(passing_->end, stream_.get());
  if (passing_) (void)api_.synchronise(passing_->end);
  if (!in_flight_.empty()) (void)api_.synchronise(in_flight_.back().end);
}

double UploadEngine::predicted_us(std::span<const Job> jobs) const {
  double us = 0;
  for (const Job& job : jobs) {
    us += settings_.latency_us + double(job.bytes.size()) / (settings_.bandwidth_gbps * 1e3);
  }
  return us * correction();
}

double UploadEngine::backlog_us() const {
  double us = std::max(0.0, free_at_us_ - now_us());
  for (const Job& job : demand_) us += predicted_us({&job, 1});
  return us;
}

double UploadEngine::queued_us() const { return backlog_us() + upload_us() * double(waiting_.size()); }

double UploadEngine::background_in_flight_us() const {
  double us = passing_ ? passing_->predicted_us : 0;
  for (const Batch& batch : in_flight_) {
    if (batch.lane() == UploadLane::kBackground) us += batch.predicted_us;
  }
  return us;
}

Upload UploadEngine::upload(const Transfer& what, UploadLane lane, double) {
  const Upload upload{.what = what, .lane = lane, .queued_us = now_us()};
  (lane == UploadLane::kDemand ? demand_ : waiting_).push_back({upload, source_(what.layer, what.expert)});
  return upload;
}

bool UploadEngine::cancel_background(int slot) {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                  [slot](const Job& job) { return job.upload.what.slot == slot; });
  if (found == waiting_.end()) return false;
  waiting_.erase(found);
  return true;
}

void UploadEngine::advance(double) {
  poll();
  begin_demand();
  begin_waiting();
}

void UploadEngine::begin_demand() {
  while (begin_from(demand_, std::numeric_limits<double>::infinity())) {
  }
}

void UploadEngine::begin_waiting() {
  for (;;) {
    if (passing_) {
      if (!pass_through_chunks(*passing_, false)) return;
      passing_.reset();
    }
    const double room_us = settings_.max_background_us - background_in_flight_us();
    if (room_us <= 0 || !begin_from(waiting_, room_us)) return;
  }
}

bool UploadEngine::begin_from(std::deque<Job>& queue, double room_us) {
  Batch batch;
  for (auto at = queue.begin(); at != queue.end();) {
    if (tables_.awaits_reader(at->upload.what.slot)) {
      if (!std::exchange(at->held, true)) ++counts_.held;
      ++at;
      continue;
    }
    if (!batch.jobs.empty()) {
      const bool small = at->bytes.size() < settings_.small_bytes;
      const bool same = small == (batch.jobs.front().bytes.size() < settings_.small_bytes);
      const Job& first = batch.jobs.front();
      // Waiting for a layer's uploads does not include those of the next layer.
      if (first.upload.lane == UploadLane::kDemand && first.upload.what.layer != at->upload.what.layer) break;
      const int most = settings_.source_pinned ? settings_.max_batch : 1;
      if (!same || int(batch.jobs.size()) >= most) break;
      if (predicted_us(batch.jobs) + predicted_us({&*at, 1}) > room_us) break;
    } else {
      // Everything that can throw comes before the queue changes.
      batch.begin = events_.take();
      batch.end = events_.take();
    }
    batch.jobs.push_back(*at);
    at = queue.erase(at);
  }
  if (batch.jobs.empty()) return false;
  batch.number = counts_.batches++;
  batch.issued_us = now_us();
  batch.predicted_us = predicted_us(batch.jobs);
  free_at_us_ = std::max(free_at_us_, batch.issued_us) + batch.predicted_us;
  const DeviceResult begun = api_.record(batch.begin, stream_.get());
  if (!begun.ok()) {
    end_batch(std::move(batch), begun);
  } else if (settings_.source_pinned) {
    std::vector<HostToDevice> copies;
    for (const Job& job : batch.jobs) {
      copies.push_back({slots_.slot(job.upload.what.slot), job.bytes.data(), job.bytes.size()});
    }
    const DeviceResult result = api_.copy(copies, stream_.get());
    end_batch(std::move(batch), result);
  } else if (batch.lane() == UploadLane::kDemand) {
    pass_through_chunks(batch, true);
  } else {
    passing_ = std::move(batch);
    if (pass_through_chunks(*passing_, false)) passing_.reset();
  }
  return true;
}

bool UploadEngine::pass_through_chunks(Batch& batch, bool may_wait) {
  const Job& job = batch.jobs.front();
  DeviceResult result;
  while (result.ok() && batch.done < job.bytes.size()) {
    Chunk& chunk = ring_[next_chunk_];
    if (chunk.busy) {
      const DeviceResult passed = may_wait ? api_.synchronise(chunk.passed) : api_.query(chunk.passed);
      if (passed.code == DeviceCode::kNotReady) return false;
      free_chunk(chunk, passed);
    }
    const size_t bytes = std::min(settings_.chunk_bytes, job.bytes.size() - batch.done);
    std::memcpy(chunk.memory, job.bytes.data() + batch.done, bytes);
    const HostToDevice copy{slots_.slot(job.upload.what.slot) + batch.done, chunk.memory, bytes};
    result = api_.copy({&copy, 1}, stream_.get());
    // Even after an error the chunk may yet be read.
    const DeviceResult recorded = api_.record(chunk.passed, stream_.get());
    chunk.busy = true;
    chunk.batch = batch.number;
    if (result.ok()) result = recorded;
    batch.done += bytes;
    next_chunk_ = (next_chunk_ + 1) % ring_.size();
  }
  end_batch(std::move(batch), result);
  return true;
}

// Whatever its outcome, its slots are not touched before its end has passed.
void UploadEngine::end_batch(Batch batch, const DeviceResult& result) {
  batch.refused = !result.ok();
  if (batch.refused) {
    fail(result);
    if (batch.lane() == UploadLane::kDemand) {
      for (const Job& job : batch.jobs) refused_.push_back(job.upload.what.slot);
    }
  }
  const DeviceResult recorded = api_.record(batch.end, stream_.get());
  if (!recorded.ok()) {
    // A stream that takes no event takes no copy either; there is nothing to wait for.
    failures_in_a_row_ = settings_.max_failures;
    land(batch, recorded);
    return;
  }
  in_flight_.push_back(std::move(batch));
}

void UploadEngine::free_chunk(Chunk& chunk, const DeviceResult& passed) {
  chunk.busy = false;
  if (!passed.ok()) lost_.emplace_back(chunk.batch, passed);
}

void UploadEngine::fail(const DeviceResult& result) {
  last_failure_ = result.what;
  ++failures_in_a_row_;
}

void UploadEngine::poll() {
  while (!in_flight_.empty()) {
    const DeviceResult result = api_.query(in_flight_.front().end);
    if (result.code == DeviceCode::kNotReady) return;
    const Batch batch = std::move(in_flight_.front());
    in_flight_.pop_front();
    // An event carries the errors since the event before it, and chunks have events of their own.
    for (Chunk& chunk : ring_) {
      if (chunk.busy && chunk.batch == batch.number) free_chunk(chunk, api_.query(chunk.passed));
    }
    const auto lost = std::find_if(lost_.begin(), lost_.end(),
                                   [&batch](const auto& entry) { return entry.first == batch.number; });
    land(batch, lost == lost_.end() ? result : lost->second);
    std::erase_if(lost_, [&batch](const auto& entry) { return entry.first == batch.number; });
  }
  free_at_us_ = std::min(free_at_us_, now_us());
}

void UploadEngine::land(const Batch& batch, const DeviceResult& result) {
  const double now = now_us();
  double us = 0;
  size_t bytes = 0;
  for (const Job& job : batch.jobs) bytes += job.bytes.size();
  const bool failed = batch.refused || !result.ok();
  if (failed) {
    if (!result.ok()) fail(result);
    counts_.failed += int64_t(batch.jobs.size());
    if (!batch.refused && batch.lane() == UploadLane::kDemand) num_demand_lost_ += int64_t(batch.jobs.size());
  } else {
    failures_in_a_row_ = 0;
    counts_.landed += int64_t(batch.jobs.size());
    counts_.bytes += int64_t(bytes);
    if (api_.elapsed_us(batch.begin, batch.end, us).ok() && settings_.source_pinned) {
      correction_.update(batch.predicted_us, us);
    }
    counts_.busy_us += us;
  }
  // Only the batch's beginning and end are known: each upload gets its share by bytes.
  double begin = std::max(std::min(std::max(batch.issued_us, last_end_us_), now - us), batch.issued_us);
  us = std::min(us, now - begin);
  last_end_us_ = begin + us;
  for (const Job& job : batch.jobs) {
    Upload upload = job.upload;
    upload.failed = failed;
    upload.begin_us = begin;
    begin += us * double(job.bytes.size()) / double(std::max<size_t>(bytes, 1));
    upload.end_us = begin;
    landed_.push_back(upload);
  }
  events_.release(batch.begin);
  events_.release(batch.end);
}

std::vector<Upload> UploadEngine::take_landed() {
  advance(0);
  if (failures_in_a_row_ >= settings_.max_failures) {
    throw DeviceError("the device has refused " + std::to_string(failures_in_a_row_) + " uploads in a row (" +
                      last_failure_ + "); start again, or run with --accelerator none");
  }
  return std::exchange(landed_, {});
}

std::optional<Upload> UploadEngine::take_if_landed(const Transfer& what) {
  poll();
  const auto found = std::find_if(landed_.begin(), landed_.end(),
                                  [&what](const Upload& upload) { return upload.what == what; });
  if (found == landed_.end()) return std::nullopt;
  const Upload upload = *found;
  landed_.erase(found);
  return upload;
}

void UploadEngine::drain() {
  for (;;) {
    advance(0);
    if (passing_) {
      (void)api_.synchronise(ring_[next_chunk_].passed);
    } else if (!in_flight_.empty()) {
      // A failure is reported by the next query.
      (void)api_.synchronise(in_flight_.front().end);
    } else {
      return;  // an upload that still waits is held by a step that has not ended
    }
  }
}

void UploadEngine::fill(const Transfer& what) {
  const std::span<const std::byte> bytes = source_(what.layer, what.expert);
  const EventHandle end = events_.take();
  for (size_t done = 0; done < bytes.size();) {
    const size_t count =
        settings_.source_pinned ? bytes.size() : std::min(settings_.chunk_bytes, bytes.size() - done);
    const std::byte* from = bytes.data() + done;
    if (!settings_.source_pinned) {
      std::memcpy(ring_[0].memory, from, count);
      from = ring_[0].memory;
    }
    const HostToDevice copy{slots_.slot(what.slot) + done, from, count};
    require(api_.copy({&copy, 1}, stream_.get()), "upload an expert");
    require(api_.record(end, stream_.get()), "upload an expert");
    require(api_.synchronise(end), "upload an expert");
    done += count;
  }
  events_.release(end);
}

void UploadEngine::compute_waits(StreamHandle compute, int layer) {
  for (auto batch = in_flight_.rbegin(); batch != in_flight_.rend(); ++batch) {
    if (batch->lane() != UploadLane::kDemand || batch->jobs.front().upload.what.layer != layer) continue;
    require(api_.wait(compute, batch->end),
            "wait for an upload");  // the stream keeps the order of the others
    return;
  }
}

void UploadEngine::host_waits() {
  const auto demand = [](const Batch& batch) { return batch.lane() == UploadLane::kDemand; };
  while (std::any_of(in_flight_.begin(), in_flight_.end(), demand)) {
    (void)api_.synchronise(in_flight_.front().end);
    poll();
  }
  if (std::exchange(num_loss_reported_, num_demand_lost_) < num_demand_lost_)
    throw DeviceError("an upload that a layer waits for failed: " + last_failure_);
}

void UploadEngine::follow_compute(StreamHandle compute) {
  require(api_.record(compute_passed_, compute), "order uploads after compute");
  require(api_.wait(stream_.get(), compute_passed_), "order uploads after compute");
}

std::vector<int> UploadEngine::take_refused() { return std::exchange(refused_, {}); }

}  // namespace twofold
