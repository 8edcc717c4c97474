// What each kernel's warps ask of shared and global memory for the shapes of real models, by the model of traffic.h.
//
// Prints one line per kernel instance: name, format, tile, threads, dynamic shared bytes, then wavefronts per request of
// shared memory and sectors per request of global reads and writes, each with the least that the same bytes need.
// `make check-cuda` keeps them in kernels/cuda/kernel_table.md. Addresses alone count, so weights are zeros; columns are
// a model's, rows only two panels, since every panel is read in the same way.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "delta_layer.h"
#include "dense_layer.h"
#include "expert_layer.h"
#include "indexer_layer.h"
#include "low_rank_layer.h"
#include "mla_layer.h"
#include "step_control.h"
#include "unpack_matrix.h"
#include "watched_run.h"

using namespace twofold;
using namespace twofold::cuda;
using kernels::WeightFormat;
using test::WatchedRun;

namespace {

constexpr int kHidden = 2048, kIntermediate = 768, kExperts = 128, kTopK = 8;  // Qwen3-30B-A3B
constexpr int kRows = 64;
constexpr int kSharedBytes = 99 * 1024;  // the least that a block may have among the architectures built for

struct Ratio {
  int64_t passes = 0, least = 0, requests = 0;
  void add(const simt::Traffic& traffic) {
    passes += traffic.passes;
    least += traffic.least;
    requests += traffic.requests;
  }
  void print() const {
    const double n = double(std::max<int64_t>(requests, 1));
    std::printf("\t%.2f\t%.2f", double(passes) / n, double(least) / n);
  }
};

// The line of `kernel`, the only one of the run whose name begins so.
void report(WatchedRun& run, const std::string& kernel, const std::string& format = "-",
            const std::string& tile = "-") {
  for (const auto& [name, size] : run.session().launch_sizes()) {
    if (name.substr(0, name.find(' ')) != kernel + "_kernel") continue;
    Ratio shared, reads, writes;
    if (const auto found = run.session().traffic().find(name); found != run.session().traffic().end()) {
      for (const auto& [key, traffic] : found->second)
        (key.shared ? shared : key.write ? writes : reads).add(traffic);
    }
    std::printf("%s\t%s\t%s\t%d\t%lld", kernel.c_str(), format.c_str(), tile.c_str(), size.threads,
                static_cast<long long>(size.shared_bytes));
    for (const Ratio& ratio : {shared, reads, writes}) ratio.print();
    std::printf("\n");
    return;
  }
  test::fail(kernel.c_str(), 0, "was not launched");
}

struct Recorded : WatchedRun {
  Recorded() : WatchedRun(1) { session().record_traffic = true; }
  template <class T>
  T* zeros(const std::string& name, size_t count, simt::Memory kind = simt::Memory::kInitialised) {
    T* at = memory<T>(name, count, kind);
    std::memset(static_cast<void*>(at), 0, count * sizeof(T));
    return at;
  }
};

int whole(int columns, WeightFormat format) {
  const int block = kernels::layout_of(format).block_columns;
  return (columns + block - 1) / block * block;
}

// One expert with `tokens` tokens, its buffers zeros.
struct Layer {
  ExpertLayout layout;
  ExpertGroups groups;
  ExpertBuffers buffers;
  uint16_t* x;

  Layer(Recorded& run, WeightFormat format, int hidden, int intermediate, int tokens) {
    const int64_t first = kernels::panel_bytes(format, hidden) * kernels::num_panels(intermediate);
    const int64_t second = kernels::panel_bytes(format, intermediate) * kernels::num_panels(hidden);
    layout = {format, format, hidden, intermediate, first, 2 * first};
    const auto* slot = run.zeros<uint8_t>("slot", size_t(2 * first + second));
    std::vector<int32_t> pairs(static_cast<size_t>(tokens));
    std::iota(pairs.begin(), pairs.end(), 0);
    groups = {run.copy("num_groups", std::vector<int32_t>{1}),
              run.copy("weights", std::vector<uint64_t>{reinterpret_cast<uint64_t>(slot)}),
              run.copy("begin", std::vector<int32_t>{0, tokens}), run.copy("pairs", pairs), 1};
    buffers = {run.zeros<uint8_t>("encoded", size_t(encoded_bytes(layout, tokens))),
               run.zeros<uint8_t>("intermediate", size_t(intermediate_bytes(layout, tokens))),
               run.zeros<float>("outputs", size_t(tokens * hidden)),
               run.zeros<float>("gate_up", size_t(2 * tokens * intermediate))};
    x = run.zeros<uint16_t>("x", size_t(tokens * hidden));
  }
};

void decode(WeightFormat format, const std::string& name) {
  for (const int tokens : {1, kDecodeTokens}) {
    const auto line = [&](const char* kernel, int hidden, int intermediate) {
      Recorded run;
      const Layer layer(run, format, whole(hidden, format), whole(intermediate, format), tokens);
      run.check(launch_decode_experts(layer.layout, layer.groups, layer.buffers, {tokens, 1, 1, kSharedBytes},
                                      nullptr),
                "decode");
      report(run, kernel, name, std::to_string(tokens));
    };
    line("gate_up", kHidden, kRows);
    line("down", kRows, kIntermediate);
  }
}

void prefill(WeightFormat format, const std::string& name) {
  for (const int tile : {kFewTokens, kManyTokens}) {
    Recorded run;
    const int columns = whole(128, format);  // each product is 128 rows, or twice that
    const Layer layer(run, format, columns, columns, tile);
    run.check(launch_prefill_experts(layer.layout, layer.groups, layer.buffers,
                                     {run.copy("tiles", std::vector<int32_t>{0, 0}), 1, tile},
                                     {layer.x, tile, 1}, nullptr),
              "prefill");
    report(run, "prefill", name, std::to_string(tile));
    if (format == WeightFormat::kBF16 && tile == kManyTokens) report(run, "gated");
  }
}

void unpack(WeightFormat format, const std::string& name) {
  Recorded run;
  const int columns = whole(kHidden, format);
  const auto* panels =
      run.zeros<uint8_t>("panels", size_t(kernels::panel_bytes(format, columns) * kRows / 32));
  auto* rows = run.zeros<uint16_t>("rows", size_t(kRows * columns));
  run.check(launch_unpack_matrix({format, panels, kRows, columns, rows, true}, nullptr), "unpack");
  report(run, "unpack", name);
}

// Every second position of one sequence.
kernels::PositionLists chosen(WatchedRun& run, int length) {
  std::vector<int32_t> positions;
  for (int p = 0; p < length; p += 2) positions.push_back(p);
  const int count = int(positions.size());
  return {run.copy("chosen", positions), run.copy("counts", std::vector<int32_t>{count}), count};
}

void attention(int head_dim, bool listed) {
  Recorded run;
  constexpr int kSequences = 1, kHeads = 16, kKvHeads = 2, kPage = 16, kPages = 20, kLength = 300;
  const size_t row = size_t(kKvHeads * head_dim), positions = size_t(kSequences * kPages * kPage);
  const KvPages kv{run.zeros<uint16_t>("keys", positions * row),
                   run.zeros<uint16_t>("values", positions * row), kPage, kKvHeads, head_dim};
  const std::vector<float> ones(size_t(head_dim), 1.0f);
  const std::string tile = std::to_string(head_dim) + (listed ? " of a list" : "");
  auto* q = run.zeros<uint16_t>("q", size_t(kSequences * kHeads * head_dim));
  const auto* norm = run.copy("norm", ones);
  const QkvRows rows{run.zeros<uint16_t>("qkv", size_t(kSequences * (kHeads + 2 * kKvHeads) * head_dim)),
                     kSequences,
                     kHeads,
                     norm,
                     norm,
                     1e-6f,
                     run.copy("cos", ones),
                     run.copy("sin", ones),
                     head_dim,
                     run.copy("places", std::vector<int64_t>{7})};
  run.check(launch_rope_store(rows, kv, q, nullptr), "rope_store");
  if (!listed) report(run, "rope_store", "-", tile);
  std::vector<int32_t> tables(size_t(kSequences * kPages));
  std::iota(tables.begin(), tables.end(), 0);
  DecodeAttention given{q,
                        run.copy("tables", tables),
                        run.copy("lengths", std::vector<int32_t>{kLength}),
                        kSequences,
                        kHeads,
                        kPages,
                        kPages * kPage,
                        {},
                        {},
                        nullptr};
  if (listed) given.chosen = chosen(run, kLength);
  auto* workspace = run.zeros<float>(
      "workspace", size_t(attention_workspace_bytes(kSequences, kHeads, head_dim, kPages * kPage) / 4));
  run.check(launch_decode_attention(given, kv, workspace, q, nullptr), "decode_attention");
  report(run, "attention_split", "-", tile);
  report(run, "attention_join", "-", tile);
}

void latent_attention(bool listed) {  // DeepSeek-V2-Lite
  Recorded run;
  constexpr int kSequences = 1, kHeads = 16, kLatent = 512, kRope = 64, kNope = 128, kPage = 16, kPages = 20;
  constexpr int kCached = kLatent + kRope, kLength = 300;
  const MlaPages pages{run.zeros<uint16_t>("latents", size_t(kSequences * kPages * kPage * kCached)), kPage,
                       kLatent, kRope};
  auto* absorbed = run.zeros<uint16_t>("absorbed", size_t(kSequences * kHeads * kCached));
  const auto* ones = run.copy("ones", std::vector<float>(kLatent, 1.0f));
  const MlaRows rows{run.zeros<uint16_t>("compressed", size_t(kSequences * kCached)),
                     kCached,
                     run.zeros<uint16_t>("queries", size_t(kSequences * kHeads * (kNope + kRope))),
                     kSequences,
                     kHeads,
                     kNope,
                     ones,
                     1e-6f,
                     ones,
                     ones,
                     true,
                     run.copy("places", std::vector<int64_t>{7})};
  run.check(launch_mla_store(rows, pages, absorbed, nullptr), "mla_store");
  if (!listed) report(run, "mla_store");
  std::vector<int32_t> tables(size_t(kSequences * kPages));
  std::iota(tables.begin(), tables.end(), 0);
  auto* workspace = run.zeros<float>(
      "workspace", size_t(mla_workspace_bytes(kSequences, kHeads, kLatent, kPages * kPage) / 4));
  MlaDecode given{absorbed,
                  run.copy("tables", tables),
                  run.copy("lengths", std::vector<int32_t>{kLength}),
                  kSequences,
                  kHeads,
                  kPages,
                  kPages * kPage,
                  {},
                  {}};
  if (listed) given.chosen = chosen(run, kLength);
  auto* out = run.zeros<uint16_t>("out", size_t(kSequences * kHeads * kLatent));
  run.check(launch_mla_decode(given, pages, workspace, out, nullptr), "mla_decode");
  report(run, "mla_split", "-", listed ? "of a list" : "-");
  report(run, "mla_join", "-", listed ? "of a list" : "-");
}

void indexer() {  // DeepSeek-V3.2
  Recorded run;
  constexpr int kHeads = 64, kDim = 128, kRotary = 64, kPage = 16, kPages = 40, kLength = 600, kMost = 256;
  constexpr int kStride = kDim + kHeads;
  const IndexPages pages{run.zeros<uint16_t>("keys", size_t(kPages * kPage * kDim)), kPage, kDim};
  const auto* projected = run.zeros<uint16_t>("projected", kStride);
  auto* queries = run.zeros<uint16_t>("queries", size_t(kHeads * kDim));
  const auto* ones = run.copy("ones", std::vector<float>(kDim, 1.0f));
  run.check(launch_index_store({projected, kStride, queries, 1, kHeads, nullptr, ones, ones, 1e-6f, ones,
                                ones, kRotary, false, false, run.copy("places", std::vector<int64_t>{7})},
                               pages, run.zeros<uint16_t>("rotated", size_t(kHeads * kDim)), nullptr),
            "index_store");
  report(run, "index_store");
  std::vector<int32_t> tables(kPages);
  std::iota(tables.begin(), tables.end(), 0);
  run.check(launch_index_choose(
                {queries, projected + kDim, kStride, run.copy("tables", tables),
                 run.copy("lengths", std::vector<int32_t>{kLength}), 1, kHeads, kPages, kPages * kPage, kMost,
                 1, 0, run.zeros<int32_t>("positions", kMost), run.zeros<int32_t>("counts", 1), false},
                pages, run.zeros<float>("scores", size_t(kPages * kPage)), nullptr),
            "index_choose");
  report(run, "index_score");
  report(run, "index_top");
}

void block_indexer() {  // MiniMax-M3
  Recorded run;
  constexpr int kHeads = 4, kDim = 128, kPage = 16, kPages = 40, kLength = 600, kBlock = 128, kMost = 256;
  const IndexPages pages{run.zeros<uint16_t>("keys", size_t(kPages * kPage * kDim)), kPage, kDim};
  std::vector<int32_t> tables(kPages);
  std::iota(tables.begin(), tables.end(), 0);
  const IndexChoice choice{run.zeros<uint16_t>("queries", size_t(kHeads * kDim)),
                           nullptr,
                           0,
                           run.copy("tables", tables),
                           run.copy("lengths", std::vector<int32_t>{kLength}),
                           1,
                           kHeads,
                           kPages,
                           kPages * kPage,
                           kMost,
                           kBlock,
                           1,
                           run.zeros<int32_t>("positions", size_t(kHeads * kMost)),
                           run.zeros<int32_t>("counts", kHeads),
                           false};
  run.check(
      launch_index_choose(choice, pages, run.zeros<float>("scores", size_t(choice.num_scores())), nullptr),
      "index_choose");
  report(run, "index_block");
}

void pooled_indexer() {  // Qwen3.8-Flash-Next
  Recorded run;
  constexpr int kDim = 128, kRotary = 32, kPage = 16, kPool = 16;
  const IndexPages pages{run.zeros<uint16_t>("keys", size_t(kPage * kDim)), kPage, kDim};
  const auto* ones = run.copy("ones", std::vector<float>(kDim, 1.0f));
  run.check(launch_index_pool(
                {kPool, run.copy("tables", std::vector<int32_t>{0}), 1, nullptr,
                 run.copy("positions", std::vector<int64_t>{kPool - 1}),
                 run.copy("places", std::vector<int64_t>{kPool - 1}), 1, ones, 1e-6f, ones, ones, kRotary},
                pages, nullptr),
            "index_pool");
  report(run, "index_pool");
}

template <int kKey>
void delta_net() {  // Qwen3-Next, whose keys have 128 elements
  Recorded run;
  constexpr int kKeyHeads = 16, kValueHeads = 32, kValue = 128, kTaps = 4;
  constexpr int kChannels = 2 * kKeyHeads * kKey + kValueHeads * kValue;
  constexpr int kWidth = kChannels + kValueHeads * kValue + 2 * kValueHeads;
  const int64_t slab = int64_t(kValueHeads) * (kValue / kDeltaBlockColumns) * delta_slab_floats(kKey);
  const DeltaRecords records{run.zeros<float>("slabs", size_t(slab)),
                             run.zeros<uint16_t>("tail", size_t(kTaps * kChannels)),
                             kKeyHeads,
                             kValueHeads,
                             kKey,
                             kValue,
                             kTaps};
  const DeltaRows rows{run.zeros<uint16_t>("projected", size_t(kWidth)),
                       kWidth,
                       run.zeros<float>("conv", size_t(kChannels * kTaps)),
                       run.zeros<float>("decay_rate", kValueHeads),
                       run.zeros<float>("decay_bias", kValueHeads),
                       run.copy("positions", std::vector<int64_t>{9}),
                       run.copy("records", std::vector<int32_t>{0}),
                       1,
                       1,
                       nullptr};
  run.check(launch_delta(rows, records, run.zeros<float>("out", size_t(kValueHeads * kValue)), nullptr),
            "delta");
  report(run, "delta", "-", kKey == 128 ? "16" : "32");
  if constexpr (kKey == 128) {
    DeltaRows newest = rows;
    newest.chain = run.zeros<int32_t>("chain", 1);
    run.check(launch_delta(newest, records, run.zeros<float>("out", size_t(kValueHeads * kValue)), nullptr),
              "delta");
    report(run, "delta_chain");
  }
}

// A layer of a table step of 32 tokens, half of its experts on the CPU.
void step() {
  Recorded run;
  constexpr int kTokens = 32, kPairs = kTokens * kTopK;
  const MailboxShape shape{1, kTokens, kTopK, kHidden};
  const MailboxLayout layout{shape};
  auto* count = run.copy("step", std::vector<uint32_t>{6});
  run.check(launch_begin_step(count, nullptr), "begin_step");
  report(run, "begin_step");
  const auto logits = test::random_floats(size_t(kTokens * kExperts), 1);
  auto* ids = run.memory<int32_t>("ids", size_t(kPairs));
  auto* weights = run.memory<float>("weights", size_t(kPairs));
  run.check(launch_route(run.copy("logits", logits), nullptr, kTokens, kExperts,
                         {.top_k = kTopK, .score = kernels::RouterScore::kSoftmax, .renormalise = true}, ids,
                         weights, nullptr),
            "route");
  report(run, "route");
  uint8_t* mailbox = run.zeros<uint8_t>("mailbox", size_t(layout.bytes()), simt::Memory::kMapped);
  std::vector<int32_t> slots(kExperts);
  for (int e = 0; e < kExperts; ++e) slots[size_t(e)] = e % 2 == 0 ? e / 2 : -1;
  const int groups = max_groups(kPairs, kExperts);
  auto* where = run.memory<uint8_t>("where", size_t(kPairs));
  auto* num_on_cpu = run.memory<uint32_t>("num_on_cpu", 1);
  run.check(launch_place(
                {ids, weights, run.zeros<uint16_t>("normed", size_t(kTokens * kHidden)), kTokens, 0},
                {run.copy("slots", slots), nullptr, 0x100000, 4096, 0, nullptr, kExperts},
                {{run.memory<int32_t>("num_groups", 1), run.memory<uint64_t>("group weights", size_t(groups)),
                  run.memory<int32_t>("begin", size_t(groups) + 1),
                  run.memory<int32_t>("pairs", size_t(kPairs)), groups},
                 where,
                 num_on_cpu},
                shape, mailbox, count, nullptr),
            "place");
  report(run, "place");
  reinterpret_cast<MailboxAnswer*>(mailbox + layout.answer(0))->answered = 7;
  run.check(launch_wait(shape, mailbox, 0, count, num_on_cpu, 1'000'000'000, nullptr), "wait");
  report(run, "wait");
  run.check(launch_combine({run.zeros<float>("outputs", size_t(kPairs * kHidden)), weights, where,
                            run.zeros<float>("from_cpu", size_t(kTokens * kHidden)), kTokens, kTopK, kHidden,
                            run.zeros<float>("hidden", size_t(kTokens * kHidden)), nullptr},
                           nullptr),
            "combine");
  report(run, "combine");
  run.check(launch_read_host(run.zeros<float>("from", 4096), run.zeros<float>("to", 4096), 4 * 4096, nullptr),
            "read_host");
  report(run, "read_host");
}

void encode(kernels::ActivationKind kind, const char* name) {
  Recorded run;
  constexpr int kTokens = 4;
  run.check(launch_encode(
                {kind, run.zeros<uint16_t>("x", kTokens * kHidden), kTokens, kHidden,
                 run.zeros<uint8_t>("out", size_t(kTokens * kernels::activation_row_bytes(kind, kHidden)))},
                nullptr),
            "encode");
  report(run, "encode", name);
}

// What an adapter of rank 16 adds to a token's projection, and the rows of an embedding.
void adapters() {
  Recorded run;
  constexpr int kRank = 16, kMatrixRows = 4096, kTokens = 2, kVocabulary = 64;
  const std::vector<LowRankFactors> factors{{run.zeros<uint16_t>("a", size_t(kRank * kHidden)),
                                             run.zeros<uint16_t>("b", size_t(kRank * kMatrixRows)), 0,
                                             kMatrixRows, kRank, 0}};
  const LowRankTable table{run.copy("factors", factors), 1, 1, 0, 1, kRank};
  const AdaptedRows rows{run.zeros<int32_t>("adapters", kTokens), nullptr, nullptr, kTokens, 1};
  auto* t = run.zeros<float>("t", size_t(kTokens * kRank));
  run.check(
      launch_low_rank_down(table, rows,
                           {run.zeros<uint16_t>("x", size_t(kTokens * kHidden)), false, 1, kHidden, kHidden},
                           t, nullptr),
      "low_rank_down");
  report(run, "low_rank_down");
  run.check(launch_low_rank_up(table, rows, t,
                               {run.zeros<uint16_t>("y", size_t(kTokens * kMatrixRows)), false, true,
                                kMatrixRows, kMatrixRows},
                               nullptr),
            "low_rank_up");
  report(run, "low_rank_up");
  const std::vector<LowRankFactors> whole{
      {run.zeros<uint16_t>("table", size_t(kVocabulary * kHidden)), nullptr, 0, 0, kHidden, 0}};
  run.check(launch_low_rank_gather({run.copy("whole", whole), 1, 1, 0, 1, kHidden}, rows,
                                   run.zeros<int64_t>("ids", kTokens),
                                   run.zeros<float>("hidden", size_t(kTokens * kHidden)), nullptr),
            "low_rank_gather");
  report(run, "low_rank_gather");
}

}  // namespace

int main() {
  for (int f = 0; f < kernels::kNumWeightFormats; ++f) {
    const auto format = WeightFormat(f);
    decode(format, kernels::layout_of(format).name);
    unpack(format, kernels::layout_of(format).name);
    if (format != WeightFormat::kF32) prefill(format, kernels::layout_of(format).name);
  }
  for (const bool listed : {false, true}) {
    for (const int head_dim : {64, 128, 256, 512}) attention(head_dim, listed);
    latent_attention(listed);
  }
  indexer();
  block_indexer();
  pooled_indexer();
  delta_net<128>();
  delta_net<256>();
  step();
  adapters();
  encode(kernels::ActivationKind::kF32, "f32");
  encode(kernels::ActivationKind::kBF16, "bf16");
  encode(kernels::ActivationKind::kQ8, "q8");
}
