// Panels in files: the mapping for reading them, and the identifier of their layout.
#include "ops/bind_panels.h"

#include <pybind11/pybind11.h>

#include <cerrno>
#include <memory>
#include <string>
#include <system_error>

#include "host/file_mapping.h"
#include "ops/bind_ops.h"
#include "ops/panel_layout.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

// Throws OSError as Python's own file calls do.
template <class Call>
auto with_os_errors(const Call& call) {
  try {
    return call();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

}  // namespace

py::array_t<uint8_t> read_only_bytes(const std::byte* bytes, size_t count, const py::object& owner) {
  py::array_t<uint8_t> view(static_cast<py::ssize_t>(count), reinterpret_cast<const uint8_t*>(bytes), owner);
  view.attr("flags").attr("writeable") = false;
  return view;
}

void bind_panels(py::module_& m) {
  m.def("panel_rows", [] { return kernels::kPanelRows; }, "Rows of a matrix in one panel.");
  m.def("panel_layout", &panel_layout,
        "What panels of this build look like; another text, and they cannot read one another's.");
  py::class_<FileMapping, std::shared_ptr<FileMapping>>(
      m, "FileMapping", py::buffer_protocol(),
      "A file in memory, read-only; its pages are shared by all processes that map it.")
      .def(py::init([](const std::string& path) {
             return with_os_errors([&] { return std::make_shared<FileMapping>(path); });
           }),
           py::arg("path"))
      .def_buffer([](const FileMapping& mapping) {
        return py::buffer_info(reinterpret_cast<const uint8_t*>(mapping.data()),
                               static_cast<py::ssize_t>(mapping.bytes()), /*readonly=*/true);
      })
      .def_property_readonly("bytes", &FileMapping::bytes)
      .def("change", &FileMapping::change,
           "What happened to the file since; empty while it is as it was mapped.")
      .def("accept", &FileMapping::accept, "The file's present state is the expected one from now on.")
      .def("release", &FileMapping::release, py::arg("offset"), py::arg("bytes"),
           "Removes whole pages from this process's page table.")
      .def(
          "populate",
          [](const FileMapping& mapping, size_t offset, size_t bytes) {
            with_os_errors([&] {
              const py::gil_scoped_release release;
              mapping.populate(offset, bytes);
            });
          },
          py::arg("offset"), py::arg("bytes"),
          "Reads the range and maps it. OSError where the disk fails or the file has become shorter.")
      .def(
          "resident_bytes",
          [](const FileMapping& mapping, size_t offset, size_t bytes) {
            return with_os_errors([&] {
              const py::gil_scoped_release release;
              return mapping.resident_bytes(offset, bytes);
            });
          },
          py::arg("offset"), py::arg("bytes"), "How much of the range is in the system's cache.");
}

}  // namespace twofold::bindings
