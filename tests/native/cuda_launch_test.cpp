// Work decompositions and layouts that are index arithmetic alone, and the small number formats.
#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <utility>

#include "check.h"
#include "launch_shapes.h"
#include "mailbox_layout.h"
#include "number_formats.h"
#include "packed_matrix.h"
#include "twofold/attention_parts.h"

using namespace twofold;
using namespace twofold::cuda;

namespace {

std::vector<int32_t> random_routing(int tokens, int top_k, int experts, std::mt19937& random) {
  std::vector<int32_t> ids;
  for (int t = 0; t < tokens; ++t) {
    std::vector<int32_t> all(static_cast<size_t>(experts));
    for (int e = 0; e < experts; ++e) all[size_t(e)] = e;
    std::shuffle(all.begin(), all.end(), random);
    ids.insert(ids.end(), all.begin(), all.begin() + top_k);
  }
  return ids;
}

}  // namespace

CASE(decode_blocks_cover_each_panel_of_each_group_once) {
  for (const int panels : {1, 2, 7, 24, 64}) {
    for (const int groups : {1, 3, 8, 128}) {
      std::map<std::pair<int, int>, int> times;
      for (int block = 0; block < groups * panels; ++block) {
        const DecodeItem item = decode_item(block, panels);
        CHECK(item.group >= 0 && item.group < groups && item.panel >= 0 && item.panel < panels);
        ++times[{item.group, item.panel}];
      }
      CHECK_EQUAL(int(times.size()), groups * panels);
    }
  }
}

CASE(decode_tiles_fit_shared_memory) {
  for (const int64_t shared : {48 * 1024, 99 * 1024, 163 * 1024, 227 * 1024}) {
    for (int64_t row = 64; row < 300 * 1024; row += 192) {
      const int tokens = decode_tile_tokens(row, 8, shared);
      CHECK(tokens >= 0 && tokens <= kDecodeTokens);
      CHECK(tokens == 0 || tokens * row + decode_sum_bytes(8, tokens) <= shared);
      CHECK(tokens == kDecodeTokens || (tokens + 1) * row + decode_sum_bytes(8, tokens + 1) > shared);
    }
  }
}

CASE(grouping_holds_each_pair_once_in_order) {
  std::mt19937 random(1);
  for (const int experts : {4, 32, 128, 257}) {
    for (const int tokens : {1, 2, 5, 32}) {
      const int top_k = std::min(experts, 4);
      const std::vector<int32_t> ids = random_routing(tokens, top_k, experts, random);
      std::vector<int32_t> pairs(ids.size(), -1);
      int begin = 0, groups = 0;
      for (int e = 0; e < experts; ++e) {
        const int count = count_pairs(ids.data(), int(ids.size()), e);
        write_pairs(ids.data(), int(ids.size()), e, pairs.data() + begin);
        for (int i = begin; i < begin + count; ++i) {
          CHECK_EQUAL(ids[size_t(pairs[size_t(i)])], e);
          CHECK(i == begin || pairs[size_t(i)] > pairs[size_t(i - 1)]);
        }
        begin += count;
        groups += count > 0;
      }
      CHECK_EQUAL(begin, int(ids.size()));
      CHECK(groups <= max_groups(int(ids.size()), experts));
    }
  }
}

CASE(prefill_tiles_cover_each_pair_once) {
  std::mt19937 random(2);
  for (const int tile : {kFewTokens, kManyTokens}) {
    for (int round = 0; round < 200; ++round) {
      const int groups = 1 + int(random() % 40);
      std::vector<int32_t> begin = {0};
      for (int g = 0; g < groups; ++g) begin.push_back(begin.back() + 1 + int32_t(random() % 300));
      const int count = tile_groups(begin.data(), groups, tile, nullptr);
      std::vector<int32_t> tiles(size_t(2 * count), -1);
      CHECK_EQUAL(tile_groups(begin.data(), groups, tile, tiles.data()), count);
      std::vector<int> times(size_t(begin.back()), 0);
      for (int i = 0; i < count; ++i) {
        const int g = tiles[size_t(2 * i)], first = tiles[size_t(2 * i + 1)];
        CHECK(g >= 0 && g < groups && first >= 0);
        const int load = begin[size_t(g) + 1] - begin[size_t(g)];
        CHECK(first < load);
        for (int p = first; p < std::min(first + tile, load); ++p) ++times[size_t(begin[size_t(g)] + p)];
      }
      CHECK(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }));
    }
  }
  CHECK_EQUAL(tile_tokens_for(8 * 512, 128), kFewTokens);
  CHECK_EQUAL(tile_tokens_for(8 * 8192, 128), kManyTokens);
}

CASE(attention_splits_cover_each_position_in_the_window_once) {
  for (const int length : {0, 1, 63, 256, 257, 1000, 4097}) {
    for (const int window : {0, 1, 100, 256, 2000}) {
      const twofold::kernels::Stretch select{.window = window};
      std::vector<int> times(size_t(length), 0);
      for (int split = 0; split < num_splits(length) + 2; ++split) {
        const SplitRange range = split_range(split, length, select.first(length - 1));
        CHECK(range.begin >= range.end || split < num_splits(length));
        for (int i = range.begin; i < range.end; ++i) ++times[size_t(i)];
      }
      for (int i = 0; i < length; ++i)
        CHECK_EQUAL(times[size_t(i)], window == 0 || i >= length - window ? 1 : 0);
    }
  }
}

CASE(attention_heads_are_each_taken_by_one_block) {
  const std::pair<int, int> shapes[] = {{32, 4}, {64, 8}, {32, 32}, {16, 1}, {40, 8}, {71, 1}};
  for (const auto& [heads, kv_heads] : shapes) {
    std::vector<int> times(size_t(heads), 0);
    for (int block = 0; block < head_blocks(heads, kv_heads); ++block) {
      const HeadRange range = head_range(block, heads, kv_heads);
      CHECK(range.count >= 1 && range.count <= kAttentionHeads);
      for (int h = range.first; h < range.first + range.count; ++h) {
        CHECK_EQUAL(h / (heads / kv_heads), range.kv_head);
        ++times[size_t(h)];
      }
    }
    CHECK(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }));
  }
}

CASE(mailbox_regions_lie_apart) {
  for (const MailboxShape shape : {MailboxShape{1, 1, 1, 8}, {48, 32, 8, 2048}, {3, 5, 7, 40}}) {
    const MailboxLayout layout{shape};
    std::vector<std::pair<int64_t, int64_t>> regions = {{layout.control(), int64_t(sizeof(MailboxControl))},
                                                        {layout.report(), int64_t(sizeof(MailboxReport))}};
    for (int layer = 0; layer < shape.num_layers; ++layer) {
      regions.push_back({layout.post(layer), int64_t(sizeof(MailboxPost))});
      regions.push_back({layout.answer(layer), int64_t(sizeof(MailboxAnswer))});
      regions.push_back({layout.ids(layer), 4 * layout.pairs()});
      regions.push_back({layout.weights(layer), 4 * layout.pairs()});
      regions.push_back({layout.where(layer), layout.pairs()});
    }
    regions.push_back({layout.activations(), 2 * int64_t(shape.max_tokens) * shape.hidden});
    regions.push_back({layout.results(), 4 * int64_t(shape.max_tokens) * shape.hidden});
    int64_t end = 0;
    for (const auto& [at, bytes] : regions) {  // ascending, each on lines of its own
      CHECK(at >= end && at % kMailboxLine == 0);
      end = at + bytes;
    }
    CHECK(layout.bytes() >= end);
  }
}

// An IEEE number of `mantissa` bits behind its sign and exponent, without infinities if there is no room for them.
float by_definition(uint32_t bits, int mantissa, int bias, int top) {
  const int exponent = int(bits >> mantissa) & (2 * bias + 1), fraction = int(bits & ((1u << mantissa) - 1));
  const float sign = bits >> top & 1u ? -1.0f : 1.0f;
  if (mantissa == 10 && exponent == 31) return fraction ? NAN : sign * INFINITY;
  const int whole = exponent == 0 ? 0 : 1 << mantissa;
  return sign * std::ldexp(float(whole + fraction), std::max(exponent, 1) - bias - mantissa);
}

CASE(small_numbers_mean_what_their_bits_say) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = kernels::float_of_f16(bits), expected = by_definition(bits, 10, 15, 15);
    CHECK(std::isnan(expected) ? std::isnan(value) : value == expected);
    CHECK_EQUAL(bits_of_float(bf16_low(bits)), bits << 16);
    CHECK_EQUAL(bits_of_float(bf16_high(bits << 16)), bits << 16);
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    if ((byte & 0x7f) == 0x7f) continue;
    CHECK_EQUAL(kernels::float_of_e4m3(byte), by_definition(byte, 3, 7, 7));
  }
  CHECK_EQUAL(bf16_of_float(1.0f), 0x3f80);
  CHECK_EQUAL(bf16_of_float(float_of_bits(0x3f808000u)), 0x3f80);  // half way: to even
  CHECK_EQUAL(bf16_of_float(float_of_bits(0x3f818000u)), 0x3f82);
  CHECK(std::isnan(float_of_bits(uint32_t(bf16_of_float(NAN)) << 16)));
}
