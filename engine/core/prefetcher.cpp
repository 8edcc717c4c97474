#include "twofold/prefetcher.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace twofold {

double PrefetchCounts::precision() const {
  return num_issued > 0 ? static_cast<double>(num_used) / static_cast<double>(num_issued) : 0.0;
}

double PrefetchCounts::recall() const {
  return num_needed > 0 ? static_cast<double>(num_foreseen) / static_cast<double>(num_needed) : 0.0;
}

Prefetcher::Prefetcher(int num_layers, int num_experts, double price, std::vector<double> layer_weight)
    : num_layers_(num_layers),
      num_experts_(num_experts),
      price_(price),
      layer_weight_(std::move(layer_weight)) {
  if (num_layers < 1 || num_experts < 1) {
    throw std::invalid_argument("prefetcher: " + std::to_string(num_layers) + " layers and " +
                                std::to_string(num_experts) + " experts given, at least 1 of each expected");
  }
  if (!(std::isfinite(price) && price >= 0)) {
    throw std::invalid_argument("prefetcher: price = " + std::to_string(price) +
                                " given, a finite number >= 0 (in misses) expected");
  }
  if (!layer_weight_.empty() && layer_weight_.size() != static_cast<size_t>(num_layers)) {
    throw std::invalid_argument("prefetcher: layer_weight of " + std::to_string(layer_weight_.size()) +
                                " entries given, none or one per layer expected");
  }
  marks_.assign(static_cast<size_t>(num_layers) * static_cast<size_t>(num_experts), Mark::kNone);
  predicted_.assign(static_cast<size_t>(num_layers), 0);
}

size_t Prefetcher::index(int layer, int expert, const char* who) const {
  if (layer < 0 || layer >= num_layers_ || expert < 0 || expert >= num_experts_) {
    throw std::invalid_argument(std::string("prefetcher: ") + who + " of layer " + std::to_string(layer) +
                                ", expert " + std::to_string(expert) + " given, layers 0 ... " +
                                std::to_string(num_layers_ - 1) + " and experts 0 ... " +
                                std::to_string(num_experts_ - 1) + " expected");
  }
  return static_cast<size_t>(layer) * static_cast<size_t>(num_experts_) + static_cast<size_t>(expert);
}

// Heap order: what is later (or as late and less probable) sinks.
bool Prefetcher::later(const PrefetchRequest& a, const PrefetchRequest& b) {
  if (a.deadline_us != b.deadline_us) return a.deadline_us > b.deadline_us;
  if (a.probability != b.probability) return a.probability < b.probability;
  return std::pair(a.layer, a.expert) > std::pair(b.layer, b.expert);
}

void Prefetcher::offer(std::span<const PrefetchRequest> requests) {
  for (const PrefetchRequest& request : requests) {
    const size_t cell = index(request.layer, request.expert, "prediction");
    if (!(request.probability >= 0 && request.probability <= 1) || !std::isfinite(request.deadline_us)) {
      throw std::invalid_argument("prefetcher: probability " + std::to_string(request.probability) +
                                  ", deadline " + std::to_string(request.deadline_us) +
                                  " given, 0 ... 1 and a finite time expected");
    }
    ++counts_.num_offered;
    predicted_[static_cast<size_t>(request.layer)] = 1;
    if (marks_[cell] == Mark::kIssued) continue;
    if (marks_[cell] == Mark::kOffered) {
      const auto queued = std::find_if(heap_.begin(), heap_.end(), [&](const PrefetchRequest& q) {
        return q.layer == request.layer && q.expert == request.expert;
      });
      if (queued != heap_.end()) {
        queued->deadline_us = std::min(queued->deadline_us, request.deadline_us);
        queued->probability = std::max(queued->probability, request.probability);
        std::make_heap(heap_.begin(), heap_.end(), later);
        continue;
      }
    }
    marks_[cell] = Mark::kOffered;
    const double weight = layer_weight_.empty() ? 1.0 : layer_weight_[static_cast<size_t>(request.layer)];
    if (request.probability * weight <= price_) {
      ++counts_.num_refused;
      continue;
    }
    heap_.push_back(request);
    std::push_heap(heap_.begin(), heap_.end(), later);
  }
}

std::optional<PrefetchRequest> Prefetcher::next(double now_us, double upload_us) {
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const PrefetchRequest request = heap_.back();
    heap_.pop_back();
    if (now_us + upload_us > request.deadline_us) {
      ++counts_.num_late;
      continue;
    }
    marks_[index(request.layer, request.expert, "prediction")] = Mark::kIssued;
    ++counts_.num_issued;
    return request;
  }
  return std::nullopt;
}

void Prefetcher::settle(int layer, std::span<const int> routed, std::span<const int> misses) {
  index(layer, 0, "routing");
  for (int expert : routed) counts_.num_used += marks_[index(layer, expert, "routing")] == Mark::kIssued;
  if (predicted_[static_cast<size_t>(layer)]) {
    counts_.num_needed += static_cast<int64_t>(misses.size());
    for (int expert : misses) counts_.num_foreseen += marks_[index(layer, expert, "miss")] != Mark::kNone;
  }
  const auto kept = std::remove_if(
      heap_.begin(), heap_.end(), [layer](const PrefetchRequest& request) { return request.layer == layer; });
  counts_.num_late += heap_.end() - kept;
  heap_.erase(kept, heap_.end());
  std::make_heap(heap_.begin(), heap_.end(), later);
  const auto first = marks_.begin() + static_cast<std::ptrdiff_t>(layer) * num_experts_;
  std::fill_n(first, num_experts_, Mark::kNone);
  predicted_[static_cast<size_t>(layer)] = 0;
}

void Prefetcher::clear() {
  heap_.clear();
  std::fill(marks_.begin(), marks_.end(), Mark::kNone);
  std::fill(predicted_.begin(), predicted_.end(), uint8_t{0});
}

}  // namespace twofold
