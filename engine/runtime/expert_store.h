// All experts of a model in host memory, each packed once as [gate | up | down] so that one copy moves it.
// Owns the memory; knows nothing of who computes with it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "twofold/kernels.h"

namespace twofold {

struct ExpertShape {
  int hidden;        // width of the residual stream
  int intermediate;  // rows of gate and up
  kernels::DType dtype;

  size_t element_bytes() const { return dtype == kernels::DType::kF32 ? 4 : 2; }
  size_t matrix_bytes() const { return size_t(hidden) * size_t(intermediate) * element_bytes(); }
  size_t bytes() const { return 3 * matrix_bytes(); }
  double flops_per_token() const { return 6.0 * hidden * intermediate; }
};

// Offsets into one packed expert: gate [intermediate, hidden], up [intermediate, hidden], down [hidden,
// intermediate].
struct ExpertView {
  const std::byte* base;
  size_t matrix_bytes;

  const std::byte* gate() const { return base; }
  const std::byte* up() const { return base + matrix_bytes; }
  const std::byte* down() const { return base + 2 * matrix_bytes; }
};

class ExpertStore {
 public:
  // Throws std::invalid_argument on sizes below one, std::bad_alloc when memory is short.
  ExpertStore(int num_layers, int num_experts, ExpertShape shape);

  // Copies one expert in. Pointers are to row-major matrices in the store's dtype.
  void put(int layer, int expert, const void* gate, const void* up, const void* down);

  const std::byte* expert(int layer, int expert) const;
  ExpertView view(const std::byte* base) const { return {base, shape_.matrix_bytes()}; }

  int num_layers() const { return num_layers_; }
  int num_experts() const { return num_experts_; }
  const ExpertShape& shape() const { return shape_; }
  size_t bytes() const { return size_t(num_layers_) * size_t(num_experts_) * shape_.bytes(); }

 private:
  size_t stride() const;  // expert size rounded up to a cache line

  int num_layers_;
  int num_experts_;
  ExpertShape shape_;
  struct Free {
    size_t bytes;
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte[], Free> memory_;
};

// Page-aligned host memory backed by huge pages where the system has them; zeroed.
std::byte* allocate_pages(size_t bytes);
void free_pages(std::byte* memory, size_t bytes);

}  // namespace twofold
