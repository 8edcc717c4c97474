#include "blocks/block_arguments.h"

#include <algorithm>

#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {

py::object BlockArguments::taken(const char* name) {
  if (!given_.contains(name)) throw py::type_error(block_ + "() misses the argument " + name);
  return given_.attr("pop")(name);
}

py::type_error BlockArguments::wrong_type(const char* name) const {
  return py::type_error(where(name) + " has the wrong type");
}

bool BlockArguments::has(const char* name) {
  if (!given_.contains(name)) return false;
  if (!given_[name].is_none()) return true;
  (void)taken(name);
  return false;
}

void BlockArguments::refuse_unread() const {
  if (given_.size() > 0)
    throw py::type_error(block_ + "() has no argument " + std::string(py::str(given_.begin()->first)));
}

int BlockArguments::at_least(int least, const char* name) {
  const int given = value<int>(name);
  if (given < least)
    throw failure(name + (" is " + std::to_string(given)) + "; expected at least " + std::to_string(least));
  return given;
}

int BlockArguments::positive_or_zero(const char* name) { return has(name) ? at_least(1, name) : 0; }

TensorView BlockArguments::array(const char* name) {
  const py::object given = taken(name);
  if (!py::isinstance<py::array>(given)) throw wrong_type(name);
  owners_.push_back(given);
  return view_of(py::reinterpret_borrow<py::array>(given));
}

const float* BlockArguments::vector(const char* name, int64_t size) {
  return expect_f32(array(name), where(name).c_str(), {size});
}

const float* BlockArguments::optional_vector(const char* name, int64_t size) {
  return has(name) ? vector(name, size) : nullptr;
}

const PackedMatrix& BlockArguments::packed(const char* name, int64_t rows, int64_t columns) {
  const py::object given = taken(name);
  if (!py::isinstance<PackedMatrix>(given)) throw wrong_type(name);
  owners_.push_back(given);
  const auto& matrix = given.cast<const PackedMatrix&>();
  expect_size(name, matrix, rows, columns);
  return matrix;
}

void BlockArguments::expect_size(const char* name, const PackedMatrix& matrix, int64_t rows,
                                 int64_t columns) const {
  const auto fits = [](int64_t size, int64_t expected) { return expected == kAny || size == expected; };
  if (fits(matrix.rows(), rows) && fits(matrix.columns(), columns)) return;
  const auto size = [](int64_t n) { return n == kAny ? std::string("any") : std::to_string(n); };
  throw failure(name + (" is packed (" + size(matrix.rows())) + ", " + size(matrix.columns()) +
                "); expected (" + size(rows) + ", " + size(columns) + ")");
}

void BlockArguments::expect_heads(const char* name, const PackedMatrix& matrix, int heads,
                                  int64_t rows) const {
  const auto& parts = matrix.segments();
  if (parts.size() == static_cast<size_t>(heads) &&
      std::all_of(parts.begin(), parts.end(), [&](const auto& part) { return part.rows == rows; }))
    return;
  throw failure(name + (" has " + std::to_string(parts.size())) + " parts; expected one of " +
                std::to_string(rows) + " rows for each of " + std::to_string(heads) + " heads");
}

}  // namespace twofold::bindings
