// Rows of tables that stay in their files, and the inputs of layers that are made of them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/bind_ops.h"
#include "ops/layer_inputs.h"
#include "ops/row_table.h"
#include "pool_view.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

using Ids = py::array_t<int64_t, py::array::c_style>;

// A table, and what its rows lie in.
class __attribute__((visibility("hidden"))) BoundRowTable {
 public:
  BoundRowTable(const PoolView& pool, std::vector<py::object> parts, int64_t cache_bytes)
      : pool_(pool), parts_(std::move(parts)), table_(made(parts_, cache_bytes)) {}

  void read(const Ids& ids, const py::array& out, int64_t first) {
    if (ids.ndim() != 2)
      throw KernelFailure("RowTable.read: ids has " + std::to_string(ids.ndim()) + " dimensions; expected 2");
    const int64_t tokens = ids.shape(0), of_token = ids.shape(1), width = of_token * table_->columns();
    const TensorView view = view_of(out);
    float* rows = expect_writable_f32(view, "RowTable.read: out", {tokens, kAny});
    if (first < 0 || first + width > view.shape[1]) {
      throw KernelFailure("RowTable.read: out has " + std::to_string(view.shape[1]) + " columns; expected " +
                          std::to_string(width) + " from column " + std::to_string(first) + " on");
    }
    const py::gil_scoped_release release;
    table_->read(pool_, ids.data(), tokens, of_token, rows + first, view.shape[1]);
  }

  void read_ahead(const Ids& ids) {
    const py::gil_scoped_release release;
    table_->read_ahead(ids.data(), ids.size());
  }

  RowTable& table() const { return *table_; }

 private:
  static std::unique_ptr<RowTable> made(const std::vector<py::object>& parts, int64_t cache_bytes) {
    std::vector<SourceMatrix> sources;
    for (size_t i = 0; i < parts.size(); ++i)
      sources.push_back(source_matrix(parts[i], "RowTable: part " + std::to_string(i)));
    try {
      return std::make_unique<RowTable>(std::move(sources), cache_bytes);
    } catch (const std::invalid_argument& wrong) {
      throw KernelFailure(wrong.what());
    }
  }

  PoolView pool_;
  std::vector<py::object> parts_;
  std::unique_ptr<RowTable> table_;
};

class __attribute__((visibility("hidden"))) BoundLayerInputs {
 public:
  using Table = std::shared_ptr<BoundRowTable>;
  using Packed = std::shared_ptr<PackedMatrix>;

  BoundLayerInputs(const PoolView& pool, Table table, Packed projection, const py::array& norm, float eps,
                   float table_scale)
      : pool_(pool),
        table_(std::move(table)),
        projection_(std::move(projection)),
        norm_(norm),
        inputs_(make(eps, table_scale)) {}

  void forward(const Ids& token_ids, const py::array& hidden, const py::array& out) {
    const int64_t T = token_ids.size();
    const float* rows =
        expect_f32(view_of(hidden), "LayerInputs.forward: hidden", {T, inputs_.hidden_size()});
    float* inputs = expect_writable_f32(view_of(out), "LayerInputs.forward: out", {T, inputs_.width()});
    const py::gil_scoped_release release;
    inputs_.forward(token_ids.data(), rows, inputs, static_cast<int>(T));
  }

 private:
  LayerInputs make(float eps, float table_scale) const {
    const TensorView norm = view_of(norm_);
    const float* weight = expect_f32(norm, "LayerInputs: norm_weight", {kAny});
    RowTable& rows = table_->table();
    const int64_t size = norm.shape[0];
    if (size < 1 || projection_->rows() % size != 0 || rows.columns() != projection_->rows()) {
      throw KernelFailure("LayerInputs: the table has " + std::to_string(rows.columns()) +
                          " columns, the projection " + std::to_string(projection_->rows()) +
                          " rows; expected equal multiples of the norm's " + std::to_string(size));
    }
    return {pool_.kernels(), pool_, rows, *projection_, weight, {static_cast<int>(size), eps, table_scale}};
  }

  // What the inputs are computed with.
  PoolView pool_;
  Table table_;
  Packed projection_;
  py::array norm_;
  LayerInputs inputs_;
};

}  // namespace

void bind_row_table(py::module_& m) {
  const auto number = [](int64_t (RowTable::*of)() const) {
    return [of](const BoundRowTable& self) { return (self.table().*of)(); };
  };
  py::class_<BoundRowTable, std::shared_ptr<BoundRowTable>>(m, "RowTable",
                                                            "Rows of a table that stays in its file.")
      .def(py::init<const PoolView&, std::vector<py::object>, int64_t>(), py::arg("pool"), py::arg("parts"),
           py::arg("cache_bytes"))
      .def("read", &BoundRowTable::read, py::arg("ids"), py::arg("out"), py::arg("first") = 0)
      .def("read_ahead", &BoundRowTable::read_ahead, py::arg("ids"))
      .def_property_readonly("rows", number(&RowTable::rows))
      .def_property_readonly("columns", number(&RowTable::columns))
      .def_property_readonly("bytes", number(&RowTable::bytes))
      .def_property_readonly("cache_bytes", number(&RowTable::cache_bytes))
      .def_property_readonly("num_slots", number(&RowTable::num_slots))
      .def_property_readonly("num_reads", number(&RowTable::num_reads))
      .def_property_readonly("num_hits", number(&RowTable::num_hits));
  py::class_<BoundLayerInputs>(m, "LayerInputs",
                               "An input for every layer, from tokens and their embeddings.")
      .def(py::init<const PoolView&, BoundLayerInputs::Table, BoundLayerInputs::Packed, const py::array&,
                    float, float>(),
           py::arg("pool"), py::kw_only(), py::arg("table"), py::arg("projection"), py::arg("norm_weight"),
           py::arg("eps"), py::arg("table_scale"))
      .def("forward", &BoundLayerInputs::forward, py::arg("token_ids"), py::arg("hidden"), py::arg("out"));
}

}  // namespace twofold::bindings
