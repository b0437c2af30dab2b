#include "check.h"
#include "ggml-backend.h"
#include "pinned.h"
#include "speculoe/speculoe.h"
#include "temp_file.h"

#include <cstring>

using namespace spo;

namespace {

const std::vector<pinned_experts::range> ranges = {
    { 0, 100, 3000 },
    { 0, 3100, 1000 },
    { 0, 50000, 5000 },
    { 0, 8000, 2000 },
};

} // namespace

TEST(what_is_pinned_is_found_by_where_it_lies_in_its_file) {
    const temp_file      file(100000);
    const file_source    source({ file.path }, SPO_SOURCE_BUFFERED);
    const pinned_experts all(ggml_backend_cpu_buffer_type(), source, ranges, size_t(1) << 30, 4096);
    CHECK(all.bytes() == 11000);
    for (const auto & r : ranges) {
        for (const size_t skip : { size_t(0), size_t(1), r.size / 2 }) {
            const uint8_t * found = all.find(r.file, r.offset + skip, r.size - skip);
            CHECK(found && std::memcmp(found, file.bytes.data() + r.offset + skip, r.size - skip) == 0);
        }
        CHECK(!all.find(r.file, r.offset + 1, r.size)); // reaches beyond
        CHECK(!all.find(1, r.offset, 1));
    }
    CHECK(!all.find(0, 0, 50) && !all.find(0, 4100, 1) && !all.find(0, 99000, 1));
}

TEST(the_first_that_does_not_fit_ends_it) {
    const temp_file      file(100000);
    const file_source    source({ file.path }, SPO_SOURCE_BUFFERED);
    const pinned_experts some(ggml_backend_cpu_buffer_type(), source, ranges, 6000, 4096);
    CHECK(some.bytes() == 4000);
    CHECK(some.find(0, 3100, 1000) && !some.find(0, 50000, 1) && !some.find(0, 8000, 1));
    const pinned_experts none(ggml_backend_cpu_buffer_type(), source, ranges, 2999, 4096);
    CHECK(none.bytes() == 0 && !none.find(0, 100, 1));
}

TEST(a_file_cut_short_is_an_error) {
    const temp_file   file(100000);
    const file_source source({ file.path }, SPO_SOURCE_BUFFERED);
    file.truncate(52000);
    try {
        const pinned_experts all(ggml_backend_cpu_buffer_type(), source, ranges, size_t(1) << 30);
        CHECK(!"read past the end");
    } catch (const source_error & e) {
        CHECK(std::strstr(e.what(), "50000"));
    }
}
