#include "moe/ranks/rank_adapters.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace twofold {
namespace {

constexpr size_t kNumbers = 9;  // kind, adapter, layer, expert, matrix, first row, rows, columns, rank

void expect_done(Ranks& ranks, int from) {
  float done;
  ranks.receive(from, {&done, 1});
}

}  // namespace

void send_adapter(Ranks& ranks, int to, const ExpertPlace& place, int adapter, const LowRank& part) {
  const LowRank::Shape& shape = part.shape();
  const int32_t job[kNumbers] = {static_cast<int32_t>(RankJob::kPutAdapter),
                                 adapter,
                                 place.layer,
                                 place.expert,
                                 place.matrix,
                                 static_cast<int32_t>(shape.first_row),
                                 static_cast<int32_t>(shape.rows),
                                 static_cast<int32_t>(shape.columns),
                                 shape.rank};
  const auto turn = ranks.lock();
  ranks.send_job(to, job, part.values());
  expect_done(ranks, to);
}

void send_drop(Ranks& ranks, int adapter) {
  const int32_t job[] = {static_cast<int32_t>(RankJob::kDropAdapter), adapter};
  const auto turn = ranks.lock();
  for (int to = 1; to < ranks.size(); ++to) ranks.send_job(to, job, {});
  for (int from = 1; from < ranks.size(); ++from) expect_done(ranks, from);
}

AdapterJob read_adapter_job(std::span<const int32_t> job, std::span<const float> values) {
  if (job.size() != kNumbers ||
      std::any_of(job.begin(), job.end(), [](int32_t number) { return number < 0; }))
    throw std::invalid_argument("a job of rank 0 is damaged: it has no adapter");
  const LowRank::Shape shape{job[5], job[6], job[7], job[8]};
  const int64_t num_a = shape.rank * shape.columns;
  if (std::ssize(values) != num_a + shape.rows * shape.rank)
    throw std::invalid_argument("a job of rank 0 is damaged: its adapter is cut off");
  return {{job[2], job[3], job[4]},
          job[1],
          std::make_shared<LowRank>(shape, values.data(), values.data() + num_a)};
}

}  // namespace twofold
