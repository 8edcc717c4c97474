// Each fault is caught with the right words under several schedules, its innocent twin never.
#include "simt/faults.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "check.h"
#include "simt/simt.h"

namespace {

struct Run {
  // With gaps between them.
  alignas(64) uint32_t words[256] = {};
  alignas(64) uint32_t gap[16] = {};
  uint32_t blank[256] = {}, second_gap[16] = {}, mapped[256] = {}, third_gap[16] = {}, elsewhere[16] = {};
  faults::Memory memory{words, blank, mapped, mapped + 64, elsewhere};
  simt::Session session;

  explicit Run(uint64_t seed) : session(seed) {
    session.add("words", words, sizeof words);
    session.add("blank", blank, sizeof blank, simt::Memory::kUninitialised);
    session.add("mapped", mapped, sizeof mapped, simt::Memory::kMapped);
    session.host_answers(memory.answer, 256);
    session.hands_over(mapped + 200);
    session.add("elsewhere", elsewhere, sizeof elsewhere);
    CHECK(session.remove(elsewhere));
  }
};

bool says(const std::string& report, const std::string& parts) {
  for (size_t first = 0; first <= parts.size();) {
    const size_t end = std::min(parts.find('|', first), parts.size());
    if (report.find(parts.substr(first, end - first)) != std::string::npos) return true;
    first = end + 1;
  }
  return false;
}

}  // namespace

CASE(every_fault_is_caught_and_its_innocent_twin_passes) {
  size_t count = 0;
  const faults::Fault* all = faults::all(count);
  for (size_t i = 0; i < count; ++i) {
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      const auto faulty = std::make_unique<Run>(seed), innocent = std::make_unique<Run>(seed);
      {
        const simt::Watched watched(&faulty->session);
        const int error = all[i].run(faulty->memory, false);
        if (error != all[i].error || !says(faulty->session.report(), all[i].report))
          std::fflush(stdout), test::fail(all[i].name, int(seed),
                                          "was not caught as '" + std::string(all[i].report) +
                                              "': " + faulty->session.report());
      }
      const simt::Watched watched(&innocent->session);
      const int error = all[i].run(innocent->memory, true);
      if (error != 0)
        std::fflush(stdout),
            test::fail(all[i].name, int(seed), "the innocent twin is accused: " + innocent->session.report());
    }
  }
}

CASE(memory_is_freed_once) {
  const auto run = std::make_unique<Run>(1);
  CHECK(!run->session.remove(run->elsewhere));
  CHECK(run->session.report().find("freed twice") != std::string::npos);
  CHECK(!run->session.remove(run->words + 1));
}

CASE(in_open_mode_memory_that_is_no_region_is_looked_at_for_races) {
  size_t count = 0;
  const faults::Fault* all = faults::all(count);
  for (size_t i = 0; i < count; ++i) {
    const std::string name = all[i].name;
    if (name != "writes_race" && name != "read_past_the_end") continue;
    std::vector<uint32_t> memory(1024);
    simt::Session session(1, simt::Mode::kOpen);
    const simt::Watched watched(&session);
    const int error = all[i].run({memory.data(), memory.data() + 512, nullptr, nullptr, nullptr}, false);
    CHECK_EQUAL(error, name == "writes_race" ? 719 : 0);
  }
}

CASE(bank_conflicts_and_sectors_are_counted) {
  for (const auto& [stride, passes] : {std::pair{1, 1}, {2, 2}, {3, 1}, {8, 8}, {32, 32}}) {
    const auto run = std::make_unique<Run>(1);
    run->session.record_traffic = true;
    const simt::Watched watched(&run->session);
    CHECK_EQUAL(faults::strided(run->memory, stride), 0);
    const auto& traffic = run->session.traffic().at("strided_kernel");
    const simt::Traffic& shared = traffic.at({true, false, 4});
    CHECK_EQUAL(shared.requests, 1);
    CHECK_EQUAL(shared.passes, passes);
    CHECK_EQUAL(shared.least, 1);
    CHECK_EQUAL(traffic.at({true, true, 4}).passes, stride);  // one each, free of conflicts
    CHECK_EQUAL(traffic.at({false, true, 4}).passes, 4);
    CHECK_EQUAL(traffic.at({false, true, 4}).least, 4);
  }
}

int main(int argc, char** argv) { return test::main(argc, argv); }
