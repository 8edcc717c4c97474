// Where a head's query, key, value and gate lie in a token's row of the projection: all queries, each followed by its gate if
// that is interleaved, then all keys, all values, and all gates.
#pragma once
#include <cstdint>

namespace twofold {

struct QkvRows {
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  int value_dim = 0;              // elements of a head's value and output
  bool keys_are_values = false;   // values are the projected keys, before norm and rotation
  bool shares_kv = false;         // the cache's layer has keys and values already: a row has none
  bool interleaved_gate = false;  // a head's gate, head_dim elements, follows its query
  int gate_rows = 0;              // elements of a head's gate after all values
  float value_scale = 1;          // factor of the values

  int group() const { return num_heads / num_kv_heads; }
  int own_kv_heads() const { return shares_kv ? 0 : num_kv_heads; }
  int64_t query_stride() const { return int64_t{interleaved_gate ? 2 : 1} * head_dim; }
  int64_t query_rows() const { return num_heads * query_stride(); }
  int64_t key_rows() const { return int64_t{own_kv_heads()} * head_dim; }
  int64_t value_rows() const { return keys_are_values ? 0 : int64_t{own_kv_heads()} * value_dim; }
  int64_t size() const { return query_rows() + key_rows() + value_rows() + int64_t{num_heads} * gate_rows; }

  int64_t query(int head) const { return head * query_stride(); }
  int64_t key(int head) const { return query_rows() + int64_t{head} * head_dim; }
  int64_t value(int head) const { return query_rows() + key_rows() + int64_t{head} * value_dim; }
  int64_t gate(int head) const {
    return gate_rows > 0 ? size() - int64_t{num_heads - head} * gate_rows : query(head) + head_dim;
  }
};

}  // namespace twofold
