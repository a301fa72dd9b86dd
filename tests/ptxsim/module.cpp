// The simulator's C API for Python, one call each; ptxsim/__init__.py gives it its shape.
#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ptxsim.h"

namespace py = pybind11;

namespace
{

struct parsed {
    std::unique_ptr<ptxsim_module, void (*)(ptxsim_module *)> module;
    explicit parsed(const std::string &text) : module(nullptr, ptxsim_module_free)
    {
        char error[4096] = "";
        module.reset(ptxsim_parse(text.c_str(), error, sizeof error));
        if (!module) throw py::value_error(error);
    }
};

// {name: {"params": [(size, alignment)], "shared": bytes, "registers": count}}
py::dict kernels(const parsed &self)
{
    py::dict all;
    const ptxsim_module *m = self.module.get();
    for (int k = 0; k < ptxsim_kernel_count(m); k++) {
        py::list params;
        for (int i = 0; i < ptxsim_param_count(m, k); i++) {
            size_t size, alignment;
            ptxsim_param(m, k, i, &size, &alignment);
            params.append(py::make_tuple(size, alignment));
        }
        py::dict one;
        one["params"] = params;
        one["shared"] = ptxsim_static_shared(m, k);
        one["registers"] = ptxsim_register_count(m, k);
        all[ptxsim_kernel_name(m, k)] = one;
    }
    return all;
}

std::string unknown(const std::string &text)
{
    std::unique_ptr<char, void (*)(void *)> lines(ptxsim_unknown(text.c_str()), std::free);
    return lines ? lines.get() : "";
}

py::bytes tensor_map(int type, uint64_t address, const std::vector<uint64_t> &dims,
                     const std::vector<uint64_t> &strides, const std::vector<uint32_t> &box,
                     const std::vector<uint32_t> &element_strides, int swizzle, bool fill_nan)
{
    unsigned char map[128];
    const char *refusal =
        ptxsim_tensor_map(map, static_cast<ptxsim_map_type>(type), static_cast<int>(dims.size()), address, dims.data(),
                          strides.data(), box.data(), element_strides.data(), swizzle, fill_nan);
    if (refusal) throw py::value_error(refusal);
    return py::bytes(reinterpret_cast<const char *>(map), sizeof map);
}

py::dict report_dict(const ptxsim_report *r)
{
    py::dict d;
    d["finished"] = ptxsim_finished(r);
    d["text"] = ptxsim_report_text(r);
    py::list findings;
    for (int i = 0; i < ptxsim_finding_count(r); i++) {
        ptxsim_finding f = ptxsim_finding_at(r, i);
        findings.append(py::make_tuple(f.kind, f.sentence, f.where, f.other, f.ptx_line, f.warp, f.lane, f.cta));
    }
    d["findings"] = findings;
    py::dict practice;
    for (const char *name : {"P1", "P2", "P3", "P4", "P5", "A1"}) practice[name] = ptxsim_practice_count(r, name);
    d["practice"] = practice;
    py::dict executed;
    py::list by_warp;
    for (int w = 0; w < ptxsim_report_warps(r); w++) by_warp.append(py::dict());
    for (int c = 0; c < ptxsim_class_count(); c++) {
        const char *name = ptxsim_class_name(c);
        executed[name] = ptxsim_executed(r, c);
        for (int w = 0; w < ptxsim_report_warps(r); w++) by_warp[w][name] = ptxsim_executed_by_warp(r, w, c);
    }
    d["executed"] = executed;
    d["executed_by_warp"] = by_warp;
    return d;
}

struct grid_of_python {
    const parsed *module;
    std::string kernel;
    std::array<unsigned, 3> grid, block, cluster;
    size_t dynamic_shared;
    std::string params;
};

py::dict run(const std::vector<std::tuple<const parsed *, std::string, std::array<unsigned, 3>, std::array<unsigned, 3>,
                                          std::array<unsigned, 3>, size_t, py::bytes>> &given,
             const std::string &schedule, uint64_t seed, bool practice, bool strict_mma_order, bool dependent,
             int threads, uint64_t max_steps)
{
    std::vector<grid_of_python> kept;
    for (const auto &[module, kernel, grid, block, cluster, shared, params] : given)
        kept.push_back({module, kernel, grid, block, cluster, shared, std::string(params)});
    std::vector<ptxsim_launch> launches;
    for (const grid_of_python &g : kept) {
        ptxsim_launch l = {};
        l.module = g.module->module.get();
        l.kernel = g.kernel.c_str();
        for (int i = 0; i < 3; i++) {
            l.grid[i] = g.grid[i];
            l.block[i] = g.block[i];
            l.cluster[i] = g.cluster[i];
        }
        l.dynamic_shared = g.dynamic_shared;
        l.params = g.params.data();
        l.params_size = g.params.size();
        launches.push_back(l);
    }
    ptxsim_options options = {};
    options.schedule = schedule == "early" ? PTXSIM_EARLY : schedule == "late" ? PTXSIM_LATE : PTXSIM_RANDOM;
    options.seed = seed;
    options.practice = practice;
    options.strict_mma_order = strict_mma_order;
    options.dependent = dependent;
    options.threads = threads;
    options.max_steps = max_steps;
    std::unique_ptr<ptxsim_report, void (*)(ptxsim_report *)> report(nullptr, ptxsim_report_free);
    {
        py::gil_scoped_release release;
        report.reset(ptxsim_run(launches.data(), static_cast<int>(launches.size()), &options));
    }
    if (!report) throw std::bad_alloc();
    return report_dict(report.get());
}

} // namespace

PYBIND11_MODULE(_ptxsim, m)
{
    py::class_<parsed>(m, "Parsed").def(py::init<const std::string &>()).def("kernels", kernels);
    m.def("unknown", unknown);
    m.def("register", [](uint64_t host, size_t bytes, bool poisoned) {
        return ptxsim_register(reinterpret_cast<void *>(host), bytes, poisoned);
    });
    m.def("unregister", ptxsim_unregister);
    m.def("poisoned", ptxsim_poisoned);
    m.def("tensor_map", tensor_map);
    m.def("run", run);
}
