// Messages to other processes, which Python sends and receives.
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

#include "host/ranks.h"
#include "ops/bind_ops.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

// Every call takes the GIL; what it raises becomes the text of each later job's failure.
class __attribute__((visibility("hidden"))) CalledRanks final : public Ranks {
 public:
  CalledRanks(int rank, int size, py::function send_job, py::function receive)
      : Ranks(rank, size), send_job_(std::move(send_job)), receive_(std::move(receive)) {}
  ~CalledRanks() override {
    const py::gil_scoped_acquire acquire;
    send_job_ = {};
    receive_ = {};
  }

  void send_job(int to, std::span<const int32_t> job, std::span<const float> rows) override {
    call([&] {
      send_job_(to, py::memoryview::from_memory(job.data(), py::ssize_t(job.size_bytes())),
                py::memoryview::from_memory(rows.data(), py::ssize_t(rows.size_bytes())));
    });
  }
  void receive(int from, std::span<float> rows) override {
    call([&] { receive_(from, py::memoryview::from_memory(rows.data(), py::ssize_t(rows.size_bytes()))); });
  }

 private:
  template <typename Call>
  void call(const Call& message) {
    const py::gil_scoped_acquire acquire;
    try {
      message();
    } catch (const py::error_already_set& raised) {
      const std::string text = py::str(raised.value());
      fail(text);
      throw RankFailure(text);
    }
  }

  py::function send_job_, receive_;
};

}  // namespace

void bind_ranks(py::module_& m) {
  py::class_<Ranks, std::shared_ptr<Ranks>>(
      m, "Ranks", "Processes that each hold a share of one model's weights; rank 0 computes the model.")
      .def(py::init(
               [](int rank, int size, py::function send_job, py::function receive) -> std::shared_ptr<Ranks> {
                 return std::make_shared<CalledRanks>(rank, size, std::move(send_job), std::move(receive));
               }),
           py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("send_job"), py::arg("receive"))
      .def("ping", &Ranks::ping, py::call_guard<py::gil_scoped_release>(),
           "Asks every rank for a sign of life, unless a job is running.")
      .def_property_readonly("rank", &Ranks::rank)
      .def_property_readonly("size", &Ranks::size);
}

}  // namespace twofold::bindings
