// The jobs of a rank other than 0.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "module.h"
#include "moe/ranks/rank_worker.h"
#include "moe/rows.h"
#include "pool_view.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

class __attribute__((visibility("hidden"))) BoundRankWorker {
 public:
  BoundRankWorker(const PoolView& pool, const std::vector<std::shared_ptr<PackedMatrix>>& matrices,
                  std::shared_ptr<ExpertStore> experts)
      : pool_(pool),
        experts_(std::move(experts)),
        worker_(pool_, {matrices.begin(), matrices.end()}, experts_.get()) {}

  py::array_t<float> run(const IntRows& job, const FloatRows& rows) {
    std::span<const float> answer;
    {
      const std::span<const int32_t> numbers{job.data(), size_t(job.size())};
      const std::span<const float> values{rows.data(), size_t(rows.size())};
      const py::gil_scoped_release release;
      answer = worker_.run(numbers, values);
    }
    return py::array_t<float>(py::ssize_t(answer.size()), answer.data());
  }

 private:
  PoolView pool_;
  std::shared_ptr<ExpertStore> experts_;
  RankWorker worker_;
};

}  // namespace

void bind_rank_worker(py::module_& m) {
  py::class_<BoundRankWorker>(m, "RankWorker",
                              "Answers the jobs of rank 0 with this rank's share of the weights.")
      .def(py::init<const PoolView&, const std::vector<std::shared_ptr<PackedMatrix>>&,
                    std::shared_ptr<ExpertStore>>(),
           py::arg("pool"), py::arg("matrices"), py::arg("experts"))
      .def("run", &BoundRankWorker::run, py::arg("job").noconvert(), py::arg("rows").noconvert(),
           "The answer [numbers] to a job, an i32 vector, and the rows sent with it, an f32 vector.");
}

}  // namespace twofold::bindings
