// Packed matrices and the ends of a model: embedding and LM head. Each wrapper keeps its arrays alive, checks
// shapes once when made, and releases the GIL while it computes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/bind_ops.h"
#include "ops/bind_panels.h"
#include "ops/embedding_head.h"
#include "pool_view.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

using Packed = std::shared_ptr<PackedMatrix>;

Packed pack(const PoolView& pool, const std::vector<py::object>& parts, std::shared_ptr<Ranks> ranks,
            int number) {
  std::vector<SourceMatrix> sources;
  for (size_t i = 0; i < parts.size(); ++i)
    sources.push_back(source_matrix(parts[i], "PackedMatrix: part " + std::to_string(i)));
  const py::gil_scoped_release release;
  try {
    return std::make_shared<PackedMatrix>(pool, sources, RankCut{std::move(ranks), number});
  } catch (const std::invalid_argument& wrong) {
    throw KernelFailure(wrong.what());
  }
}

using PartArgument = std::pair<std::string, int64_t>;  // (format, rows)

Packed map_panels(const PoolView& pool, const std::vector<PartArgument>& arguments, int64_t columns,
                  std::shared_ptr<FileMapping> file, size_t offset) {
  std::vector<PackedMatrix::Part> parts;
  for (const auto& [format, rows] : arguments) parts.push_back({format_named(format), rows});
  const py::gil_scoped_release release;
  try {
    return std::make_shared<PackedMatrix>(pool, parts, columns, std::move(file), offset);
  } catch (const std::invalid_argument& wrong) {
    throw KernelFailure(wrong.what());
  }
}

std::vector<std::string> formats_of(const PackedMatrix& matrix) {
  std::vector<std::string> names;
  for (const PackedMatrix::Segment& segment : matrix.segments())
    names.emplace_back(kernels::layout_of(segment.format).name);
  return names;
}

std::shared_ptr<LowRank> low_rank(const py::array& a, const py::array& b, int64_t first_row,
                                  const LowRank* like) {
  const TensorView down = view_of(a), up = view_of(b);
  const float* const values = expect_f32(down, "LowRank: a", {kAny, kAny});
  const int64_t rank = down.shape[0], rows = up.shape[0], columns = down.shape[1];
  const float* const ups = expect_f32(up, "LowRank: b", {kAny, rank});
  const py::gil_scoped_release release;
  return std::make_shared<LowRank>(LowRank::Shape{first_row, rows, columns, static_cast<int>(rank)}, values,
                                   ups, like);
}

void put_adapter(PackedMatrix& matrix, const std::shared_ptr<AdapterRows>& rows, int adapter,
                 const std::shared_ptr<LowRank>& part) {
  matrix.put_adapter(rows, adapter, part);
}

class __attribute__((visibility("hidden"))) BoundLmHead {
 public:
  BoundLmHead(const PoolView& pool, const std::optional<py::array>& norm, const Packed& weight, float eps,
              float softcap)
      : pool_(pool),
        norm_(norm),
        weight_(weight),
        eps_(eps),
        softcap_(softcap),
        head_(pool.kernels(), pool,
              norm ? expect_f32(view_of(*norm), "LmHead: norm_weight", {weight->columns()}) : nullptr,
              *weight, eps, softcap) {}

  void forward(const py::array& hidden_rows, const py::array& logits) {
    const TensorView view = view_of(hidden_rows);
    const float* rows = expect_f32(view, "LmHead.forward: hidden_rows", {kAny, head_.hidden_size()});
    float* out =
        expect_writable_f32(view_of(logits), "LmHead.forward: logits", {view.shape[0], head_.vocabulary()});
    const py::gil_scoped_release release;
    head_.forward(rows, out, static_cast<int>(view.shape[0]));
  }

  void norm(const py::array& hidden_rows, const py::array& out) {
    const TensorView view = view_of(hidden_rows);
    const float* rows = expect_f32(view, "LmHead.norm: hidden_rows", {kAny, head_.hidden_size()});
    float* normed =
        expect_writable_f32(view_of(out), "LmHead.norm: out", {view.shape[0], head_.hidden_size()});
    const py::gil_scoped_release release;
    head_.norm(rows, normed, static_cast<int>(view.shape[0]));
  }

  std::unique_ptr<BoundLmHead> with_norm(const py::array& norm) const {
    return std::make_unique<BoundLmHead>(pool_, norm, weight_, eps_, softcap_);
  }

  std::unique_ptr<BoundLmHead> with_weight(const Packed& weight) const {
    return std::make_unique<BoundLmHead>(pool_, norm_, weight, eps_, softcap_);
  }

 private:
  // Input rows of the head.
  PoolView pool_;
  std::optional<py::array> norm_;
  Packed weight_;
  float eps_, softcap_;
  LmHead head_;
};

// A table checked once: checking it in every step takes longer than reading one row.
class __attribute__((visibility("hidden"))) BoundEmbedding {
 public:
  BoundEmbedding(const PoolView& pool, py::object table)
      : pool_(pool), table_(std::move(table)), weight_(source_matrix(table_, "Embedding: table")) {}

  void forward(const py::array& token_ids, const py::array& out) {
    const TensorView ids = view_of(token_ids);
    const int32_t* tokens = expect_i32(ids, "Embedding.forward: token_ids", {kAny});
    float* rows =
        expect_writable_f32(view_of(out), "Embedding.forward: out", {ids.shape[0], weight_.columns});
    const py::gil_scoped_release release;
    embed(pool_, weight_, tokens, rows, static_cast<int>(ids.shape[0]));
  }

 private:
  PoolView pool_;
  py::object table_;  // what the weight points into
  SourceMatrix weight_;
};

void embed_tokens(const PoolView& pool, const py::object& table, const py::array& token_ids,
                  const py::array& out) {
  const SourceMatrix weight = source_matrix(table, "embed: table");
  const TensorView ids = view_of(token_ids);
  const int32_t* tokens = expect_i32(ids, "embed: token_ids", {kAny});
  float* rows = expect_writable_f32(view_of(out), "embed: out", {ids.shape[0], weight.columns});
  const py::gil_scoped_release release;
  embed(pool, weight, tokens, rows, static_cast<int>(ids.shape[0]));
}

}  // namespace

void bind_dense_ops(py::module_& m) {
  py::class_<AdapterRows, std::shared_ptr<AdapterRows>>(
      m, "AdapterRows", "Which adapter each row of the coming products uses: one object per model.")
      .def(py::init<>())
      .def("set", &AdapterRows::set, py::arg("adapters"),
           "One number per row of the step, -1 for none; an empty list: no row uses any.");
  py::class_<LowRank, std::shared_ptr<LowRank>>(
      m, "LowRank", "What an adapter adds to a product with some rows of a matrix: B (A x).")
      .def(py::init(&low_rank), py::arg("a"), py::arg("b"), py::arg("first_row") = 0,
           py::arg("like") = py::none(),
           "a: float32 [rank, columns]; b: float32 [rows, rank], for the matrix's rows from first_row on. "
           "like: a "
           "product that may have the same a, which then lies in memory once.")
      .def_property_readonly("bytes", &LowRank::bytes);
  py::class_<PackedMatrix, Packed>(m, "PackedMatrix", "Matrices stacked by rows, in the kernels' panels.")
      .def(py::init(&pack), py::arg("pool"), py::arg("parts"), py::arg("ranks") = py::none(),
           py::arg("number") = RankCut::kNotCut)
      .def_static("from_file", &map_panels, py::arg("pool"), py::arg("parts"), py::arg("columns"),
                  py::arg("file"), py::arg("offset"), "Panels that lie in a file; parts are (format, rows).")
      .def_property_readonly("rows", &PackedMatrix::rows)
      .def_property_readonly("columns", &PackedMatrix::columns)
      .def_property_readonly("bytes", &PackedMatrix::bytes)
      .def_property_readonly("formats", &formats_of)
      .def_property_readonly("segment_rows",
                             [](const PackedMatrix& matrix) {
                               std::vector<int64_t> rows;
                               for (const PackedMatrix::Segment& segment : matrix.segments())
                                 rows.push_back(segment.rows);
                               return rows;
                             })
      .def("put_adapter", &put_adapter, py::arg("rows"), py::arg("adapter"), py::arg("part"),
           "Rows of products that use `adapter` get what the part adds to them. Between two steps only.")
      .def("drop_adapter", &PackedMatrix::drop_adapter, py::arg("adapter"))
      .def_property_readonly("panels", [](const py::object& self) {
        const auto& matrix = self.cast<const PackedMatrix&>();
        return read_only_bytes(matrix.panels(), matrix.bytes(), self);
      });
  m.def("embed", &embed_tokens, py::arg("pool"), py::arg("table"), py::arg("token_ids"), py::arg("out"));
  py::class_<BoundEmbedding>(m, "Embedding", "Rows of a table by token.")
      .def(py::init<const PoolView&, py::object>(), py::arg("pool"), py::arg("table"))
      .def("forward", &BoundEmbedding::forward, py::arg("token_ids"), py::arg("out"));
  py::class_<BoundLmHead>(m, "LmHead", "Final norm and output projection.")
      .def(py::init<const PoolView&, const std::optional<py::array>&, const Packed&, float, float>(),
           py::arg("pool"), py::arg("norm_weight"), py::arg("weight"), py::arg("eps"),
           py::arg("softcap") = 0.0f)
      .def("forward", &BoundLmHead::forward, py::arg("hidden_rows"), py::arg("logits"))
      .def("norm", &BoundLmHead::norm, py::arg("hidden_rows"), py::arg("out"))
      .def("with_weight", &BoundLmHead::with_weight, py::arg("weight"), "The same with another matrix.")
      .def("with_norm", &BoundLmHead::with_norm, py::arg("norm_weight"),
           "The same matrix after another norm.");
}

}  // namespace twofold::bindings
