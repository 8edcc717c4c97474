// Keyword arguments of a block: each is read by its name, checked once, and kept by the block that reads its memory.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/packed_matrix.h"
#include "ops/tensor_view.h"
#include "owning.h"
#include "pool_view.h"

namespace twofold::bindings {

// Reading an argument takes it out. TypeError for one that is missing or of another type, KernelFailure for one that
// does not fit.
class __attribute__((visibility("hidden"))) BlockArguments {
 public:
  // block: begins messages.
  BlockArguments(std::string block, const PoolView& pool, const pybind11::dict& given)
      : block_(std::move(block)), pool_(pool), given_(given.attr("copy")()) {}

  const PoolView& pool() const { return pool_; }
  // "Gqa: sinks"
  std::string where(const char* name) const { return block_ + ": " + name; }
  KernelFailure failure(const std::string& text) const { return KernelFailure(block_ + ": " + text); }

  template <typename Value>
  Value value(const char* name) {
    try {
      return taken(name).cast<Value>();
    } catch (const pybind11::cast_error&) {
      throw wrong_type(name);
    }
  }
  template <typename Value>
  Value value(const char* name, Value otherwise) {
    return given_.contains(name) ? value<Value>(name) : otherwise;
  }
  int at_least(int least, const char* name);
  // 0 without it, or for None.
  int positive_or_zero(const char* name);

  TensorView array(const char* name);
  const float* vector(const char* name, int64_t size);
  const float* optional_vector(const char* name, int64_t size);
  // kAny: any size.
  const PackedMatrix& packed(const char* name, int64_t rows, int64_t columns);
  void expect_size(const char* name, const PackedMatrix& matrix, int64_t rows, int64_t columns) const;
  // As many parts as heads, each of so many rows.
  void expect_heads(const char* name, const PackedMatrix& matrix, int heads, int64_t rows) const;
  // Whether an optional argument is there; None counts as missing.
  bool has(const char* name);

  // What `read` makes of a part: an argument that is a dict of arguments, all of which it must read.
  template <typename Read>
  auto part(const char* name, Read read) {
    BlockArguments inner(block_ + "." + name, pool_, value<pybind11::dict>(name));
    auto made = read(inner);
    inner.refuse_unread();
    owners_.insert(owners_.end(), inner.owners_.begin(), inner.owners_.end());
    return made;
  }

  // The block, with the pool and all arrays and matrices that were read. TypeError if an argument was not.
  template <typename Kind>
  std::shared_ptr<Kind> own(Kind block) {
    refuse_unread();
    return owning(std::make_unique<Kind>(std::move(block)), pool_, std::move(owners_));
  }

 private:
  pybind11::object taken(const char* name);
  pybind11::type_error wrong_type(const char* name) const;
  void refuse_unread() const;

  std::string block_;
  PoolView pool_;
  pybind11::dict given_;
  std::vector<pybind11::object> owners_;
};

}  // namespace twofold::bindings
