// A gated delta net: convolution, norms and recurrence of a sequence's tokens, one after the other, by one block for 32
// columns of a head's state, which stays in registers: a slab is read and written once, however many tokens there are.

#include "delta_layer.h"
#include "launch_shapes.h"
#include "machine.cuh"
#include "number_formats.h"

namespace twofold::cuda {

namespace {

using kernels::float_of_bf16;

constexpr int kThreads = 256;
constexpr int kSlices =
    kThreads / kDeltaBlockColumns;  // slices of a column's keys: thread (slice, column) has every 8th
constexpr float kNormEpsilon = 1e-6f;

struct Shared {
  float q[kDeltaMaxKeys], k[kDeltaMaxKeys], v[kDeltaBlockColumns];
  float products[3];  // q . q, k . k, q . k
  float seen[kSlices][kDeltaBlockColumns], asked[kSlices][kDeltaBlockColumns];
};

struct Place {
  int sequence, head, block, key_head, record;
};

// A block's part of a record (delta_slab_floats).
struct Slab {
  float* state;
  int key_dim;

  __device__ Slab(const DeltaRecords& r, const Place& at, int record)
      : state(r.slabs + ((int64_t(record) * r.num_v_heads + at.head) * gridDim.x + at.block) *
                            delta_slab_floats(r.key_dim)),
        key_dim(r.key_dim) {}
  __device__ float* key() const { return state + int64_t(key_dim) * kDeltaBlockColumns; }
  __device__ float* delta() const { return key() + key_dim; }
  __device__ float* decay() const { return delta() + kDeltaBlockColumns; }
  __device__ int32_t* position() const { return reinterpret_cast<int32_t*>(decay() + 1); }
};

__device__ inline int channels_of(const DeltaRecords& r) {
  return 2 * r.num_k_heads * r.key_dim + r.num_v_heads * r.value_dim;
}

__device__ inline float convolved(const DeltaRows& rows, const DeltaRecords& r, const Place& at, int token,
                                  int64_t position, int channel) {
  const int channels = channels_of(r);
  const uint16_t* projected = static_cast<const uint16_t*>(rows.projected);
  const uint16_t* tail = static_cast<const uint16_t*>(r.tail) + int64_t(at.record) * r.taps * channels;
  float sum = 0;
  for (int j = 0; j < r.taps; ++j) {
    const int back = r.taps - 1 - j;
    if (position < back) continue;
    const uint16_t input =
        token >= back
            ? projected[(int64_t(at.sequence) * rows.num_tokens + token - back) * rows.stride + channel]
            : tail[(position - back) % r.taps * channels + channel];
    sum += rows.conv[int64_t(channel) * r.taps + j] * float_of_bf16(input);
  }
  return sum / (1.0f + expf(-sum));
}

// Queries and keys of the head and values of the block's columns, and the products of the first two.
__device__ inline void prepare(const DeltaRows& rows, const DeltaRecords& r, const Place& at, int token,
                               int64_t position, Shared& shared) {
  const int K = r.key_dim, keys = r.num_k_heads * K, thread = threadIdx.x;
  for (int i = thread; i < 2 * K; i += kThreads) {
    const int channel = i < K ? at.key_head * K + i : keys + at.key_head * K + i - K;
    (i < K ? shared.q[i] : shared.k[i - K]) = convolved(rows, r, at, token, position, channel);
  }
  if (thread < kDeltaBlockColumns) {
    const int column = at.block * kDeltaBlockColumns + thread;
    const bool there = column < r.value_dim;
    const int channel = 2 * keys + at.head * r.value_dim + column;
    shared.v[thread] = there ? convolved(rows, r, at, token, position, channel) : 0.0f;
  }
  __syncthreads();
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  if (warp < 3) {
    const float* a = warp == 1 ? shared.k : shared.q;
    const float* b = warp == 0 ? shared.q : shared.k;
    float sum = 0;
    for (int i = lane; i < K; i += kWarpSize) sum += a[i] * b[i];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) shared.products[warp] = sum;
  }
  __syncthreads();
}

// Rows of the block's sequence; 0: its rows are another block's.
template <bool kChained>
__device__ inline int num_tokens_of(const DeltaRows& rows, int sequence) {
  if constexpr (!kChained) return rows.num_tokens;
  if (rows.chain[sequence] > 0) return 0;
  int count = 1;
  while (sequence + count < rows.num_sequences && rows.chain[sequence + count] == count) ++count;
  return count;
}

// kChained: rows have a chain, and each writes its own record.
template <int kRows, bool kChained>
__device__ inline void carry(const DeltaRows& rows, const DeltaRecords& r, float* out, Shared& shared) {
  const int column = threadIdx.x % kDeltaBlockColumns, slice = threadIdx.x / kDeltaBlockColumns;
  const int head = blockIdx.y, of_key = r.num_v_heads / r.num_k_heads, K = r.key_dim;
  const Place at{int(blockIdx.z), head, int(blockIdx.x), head / of_key, rows.records[blockIdx.z]};
  const int of_head = at.block * kDeltaBlockColumns + column;
  const bool there = slice == 0 && of_head < r.value_dim;
  const int64_t first_row = int64_t(at.sequence) * rows.num_tokens;
  const int num_tokens = num_tokens_of<kChained>(rows, at.sequence);
  if (num_tokens == 0) return;
  float* to = out + (first_row * r.num_v_heads + head) * r.value_dim + of_head;
  const int64_t out_stride = int64_t(r.num_v_heads) * r.value_dim;
  if (at.record < 0) {
    for (int t = 0; there && t < num_tokens; ++t) to[t * out_stride] = 0;
    return;
  }
  const int64_t begin = rows.positions[first_row];
  const Slab before(r, at, at.record);

  float state[kRows];
  const bool follows = begin > 0 && *before.position() == int(begin) - 1;
  const float decay_before = follows ? *before.decay() : 1.0f;
  const float delta_before = follows ? before.delta()[column] : 0.0f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = slice + i * kSlices;
    state[i] = 0;
    if (row >= K || begin == 0) continue;
    state[i] = decay_before * before.state[row * kDeltaBlockColumns + column];
    if (follows) state[i] += before.key()[row] * delta_before;
  }
  const uint16_t* gates = static_cast<const uint16_t*>(rows.projected) + first_row * rows.stride +
                          channels_of(r) + r.num_v_heads * r.value_dim;
  float decay = 1, delta = 0, key_scale = 0;
  for (int t = 0; t < num_tokens; ++t, gates += rows.stride) {
    prepare(rows, r, at, t, begin + t, shared);
    const float query_scale = rsqrtf(shared.products[0] + kNormEpsilon) * rsqrtf(float(K));
    key_scale = rsqrtf(shared.products[1] + kNormEpsilon);
    float seen = 0, asked = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = slice + i * kSlices;
      if (row >= K) continue;
      seen += shared.k[row] * state[i];
      asked += shared.q[row] * state[i];
    }
    shared.seen[slice][column] = seen;
    shared.asked[slice][column] = asked;
    __syncthreads();
    seen = asked = 0;
    for (int s = 0; s < kSlices; ++s) {
      seen += shared.seen[s][column];
      asked += shared.asked[s][column];
    }
    const float a = float_of_bf16(gates[r.num_v_heads + head]) + rows.decay_bias[head];
    const float softplus = a > 20.0f ? a : log1pf(expf(a));
    decay = expf(rows.decay_rate[head] * softplus);
    const float beta = 1.0f / (1.0f + expf(-float_of_bf16(gates[head])));
    delta = beta * (shared.v[column] - decay * (seen * key_scale));
    const float kq = shared.products[2] * key_scale * query_scale;
    if (there) to[t * out_stride] = decay * (asked * query_scale) + kq * delta;
    if (kChained || t + 1 == num_tokens) {
      const Slab kept(r, at, kChained ? rows.records[at.sequence + t] : at.record);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = slice + i * kSlices;
        if (row >= K) continue;
        kept.state[row * kDeltaBlockColumns + column] = state[i];
        if (column == 0) kept.key()[row] = shared.k[row] * key_scale;
      }
      if (slice == 0) {
        kept.delta()[column] = delta;
        if (column == 0) {
          *kept.decay() = decay;
          *kept.position() = int(begin) + t;
        }
      }
    }
    if (t + 1 == num_tokens) break;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = slice + i * kSlices;
      if (row < K) state[i] = decay * state[i] + shared.k[row] * key_scale * delta;
    }
    __syncthreads();
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads) delta_kernel(DeltaRows rows, DeltaRecords r, float* out) {
  carry<kRows, false>(rows, r, out, static_shared<Shared>());
}

// One block for each multiprocessor at least: otherwise the compiler aims at three and spills registers.
__global__ void __launch_bounds__(kThreads, 1)
    delta_chain_kernel(DeltaRows rows, DeltaRecords r, float* out) {
  carry<kDeltaMaxKeys / kSlices, true>(rows, r, out, static_shared<Shared>());
}

}  // namespace

int launch_delta(const DeltaRows& rows, const DeltaRecords& records, float* out, Stream stream) {
  const int64_t channels =
      2 * int64_t(records.num_k_heads) * records.key_dim + int64_t(records.num_v_heads) * records.value_dim;
  const int64_t width =
      channels + int64_t(records.num_v_heads) * records.value_dim + 2 * int64_t(records.num_v_heads);
  if (rows.projected == nullptr || rows.conv == nullptr || rows.decay_rate == nullptr ||
      rows.decay_bias == nullptr || rows.positions == nullptr || rows.records == nullptr ||
      records.slabs == nullptr || records.tail == nullptr || out == nullptr || rows.num_sequences < 1 ||
      rows.num_tokens < 1 || (rows.chain != nullptr && rows.num_tokens != 1) || records.num_k_heads < 1 ||
      records.num_v_heads < 1 || records.num_v_heads % records.num_k_heads != 0 || records.key_dim < 1 ||
      records.key_dim > kDeltaMaxKeys || records.value_dim < 1 || records.taps < 2 || rows.stride < width) {
    return cudaErrorInvalidValue;
  }
  const int blocks = (records.value_dim + kDeltaBlockColumns - 1) / kDeltaBlockColumns;
  const dim3 grid(blocks, records.num_v_heads, rows.num_sequences);
  if (rows.chain != nullptr) return launch(delta_chain_kernel, grid, kThreads, 0, stream, rows, records, out);
  if (records.key_dim <= 16 * kSlices)
    return launch(delta_kernel<16>, grid, kThreads, 0, stream, rows, records, out);
  return launch(delta_kernel<32>, grid, kThreads, 0, stream, rows, records, out);
}

}  // namespace twofold::cuda
