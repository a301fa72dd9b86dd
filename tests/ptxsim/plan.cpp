// The C API's answers for the tests: which kernel would run a forward call, how, and why not. ptxsim/plan.py gives it
// its shape.
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/tiling.h"

namespace py = pybind11;

namespace
{

const void *address(const py::dict &d, const char *name)
{
    return reinterpret_cast<const void *>(d[name].cast<uintptr_t>());
}

void copy(int64_t *to, const py::dict &d, const char *name, size_t count)
{
    auto from = d[name].cast<std::vector<int64_t>>();
    if (from.size() != count) throw std::invalid_argument(std::string(name) + " has another rank");
    std::memcpy(to, from.data(), count * sizeof *to);
}

// The forward's parameters from a dict of the struct's own names; lo and hi may be None: unbounded.
fa4_fwd_params params(const py::dict &d)
{
    fa4_fwd_params p = {};
    p.q = address(d, "q");
    p.k = address(d, "k");
    p.v = address(d, "v");
    p.o = const_cast<void *>(address(d, "o"));
    p.lse = const_cast<void *>(address(d, "lse"));
    p.len_kv_of = static_cast<const int32_t *>(address(d, "len_kv_of"));
    copy(p.stride_q, d, "stride_q", 4);
    copy(p.stride_k, d, "stride_k", 4);
    copy(p.stride_v, d, "stride_v", 4);
    copy(p.stride_o, d, "stride_o", 4);
    copy(p.stride_lse, d, "stride_lse", 3);
    for (auto [name, field] : {std::pair{"batch", &p.batch},
                               {"heads_q", &p.heads_q},
                               {"heads_kv", &p.heads_kv},
                               {"len_q", &p.len_q},
                               {"len_kv", &p.len_kv},
                               {"dim", &p.dim},
                               {"dim_v", &p.dim_v}})
        *field = d[name].cast<int64_t>();
    p.lo = d["lo"].is_none() ? FA4_UNBOUNDED_LO : d["lo"].cast<int64_t>();
    p.hi = d["hi"].is_none() ? FA4_UNBOUNDED_HI : d["hi"].cast<int64_t>();
    p.scale = d["scale"].cast<double>();
    p.dtype = static_cast<fa4_dtype>(d["dtype"].cast<int>());
    if (d.contains("mask_type")) p.mask_type = static_cast<fa4_mask_type>(d["mask_type"].cast<int>());
    return p;
}

py::dict plan_dict(const fa4_plan &plan)
{
    py::dict d;
    d["kernel"] = plan.kernel;
    auto three = [](const uint32_t *x) { return py::make_tuple(x[0], x[1], x[2]); };
    d["grid"] = three(plan.grid);
    d["block"] = three(plan.block);
    d["cluster"] = three(plan.cluster);
    d["shared_bytes"] = plan.shared_bytes;
    d["args"] = py::bytes(reinterpret_cast<const char *>(plan.args), plan.args_size);
    py::list maps;
    for (int i = 0; i < plan.map_count; i++) {
        const fa4_tensor_map &m = plan.map[i];
        py::dict map;
        map["address"] = m.address;
        map["type"] = static_cast<int>(m.type);
        map["size"] = std::vector<uint64_t>(m.size, m.size + m.rank);
        map["stride"] = std::vector<uint64_t>(m.stride, m.stride + m.rank - 1);
        map["box"] = std::vector<uint32_t>(m.box, m.box + m.rank);
        map["element_stride"] = std::vector<uint32_t>(m.element_stride, m.element_stride + m.rank);
        map["swizzle"] = m.swizzle;
        maps.append(map);
    }
    d["maps"] = maps;
    return d;
}

// ctas: on Blackwell the form to take, 1 or 2; 0 leaves it to the plan.
fa4_plan plan_of(const py::dict &d, int arch, int multiprocessors, int ctas)
{
    fa4_fwd_params p = params(d);
    fa4_chip chip = {};
    chip.arch = arch;
    chip.multiprocessors = multiprocessors;
    fa4_plan plan = {};
    if (fa4_fwd_plan(&p, &chip, &plan) != FA4_OK) throw py::value_error(fa4_last_error());
    if (ctas) {
        fa4_fwd_tiling tiling;
        if (!fa4_sm100_fwd_tiling(&p, ctas, &tiling)) throw py::value_error("there is no such form of these head dims");
        fa4_fwd_plan_of(&p, &chip, &tiling, &plan);
    }
    return plan;
}

py::dict fwd_plan(const py::dict &d, int arch, int multiprocessors, int ctas)
{
    return plan_dict(plan_of(d, arch, multiprocessors, ctas));
}

// What each CTA of a plan takes, in its order: [[(place in the list, batch, head, head of k and v, block), ...], ...].
py::list fwd_tiles(const py::dict &d, int arch, int multiprocessors)
{
    const fa4_plan plan = plan_of(d, arch, multiprocessors, 0);
    fa4_fwd_args args;
    std::memcpy(&args, plan.args, sizeof args);
    const int ctas = static_cast<int>(plan.grid[0] / plan.cluster[0]); // a cluster takes a tile together
    py::list all;
    for (int cta = 0; cta < ctas; cta++) {
        py::list own;
        for (int round = 0; round * ctas < args.tiles.count; round++) {
            const int index = fa4_tile_index(&args.tiles, round, cta, ctas);
            if (index >= args.tiles.count) continue;
            const fa4_tile tile = fa4_tile_at(&args.tiles, index);
            own.append(py::make_tuple(index, tile.batch, tile.head, tile.head_kv, tile.block));
        }
        all.append(own);
    }
    return all;
}

py::object fwd_unsupported(const py::dict &d, int arch)
{
    fa4_fwd_params p = params(d);
    const char *reason = fa4_fwd_unsupported(&p, arch);
    return reason ? py::object(py::str(reason)) : py::none();
}

} // namespace

PYBIND11_MODULE(_fa4plan, m)
{
    m.def("fwd_plan", fwd_plan);
    m.def("fwd_tiles", fwd_tiles);
    m.def("fwd_unsupported", fwd_unsupported);
}
