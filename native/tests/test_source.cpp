#include "check.h"
#include "source.h"
#include "speculoe/speculoe.h"
#include "temp_file.h"

#include <cstring>

using namespace spo;

static const int kinds[] = { SPO_SOURCE_BUFFERED, SPO_SOURCE_DIRECT, SPO_SOURCE_MAPPED };

TEST(every_kind_reads_the_same_bytes_at_any_offset) {
    const size_t    size = (size_t(3) << 20) + 1234; // longer than a direct read's chunk, not aligned
    const temp_file file(size);
    for (const int kind : kinds) {
        const file_source source({ file.path }, kind);
        std::mt19937      random(2);
        for (int i = 0; i < 40; ++i) {
            const size_t         offset = i == 0 ? 0 : random() % size;
            const size_t         length = i == 0 ? size : 1 + random() % (size - offset);
            std::vector<uint8_t> out(length + 2, 0xAB);
            source.read(0, offset, length, out.data() + 1);
            CHECK(std::memcmp(out.data() + 1, file.bytes.data() + offset, length) == 0);
            CHECK(out.front() == 0xAB && out.back() == 0xAB);
        }
    }
}

TEST(a_file_that_shrank_is_an_error_that_names_file_and_offset) {
    for (const int kind : kinds) {
        const temp_file   file(100000);
        const file_source source({ file.path }, kind);
        file.truncate(50000);
        std::vector<uint8_t> out(1000);
        source.read(0, 49000, 1000, out.data());
        try {
            source.read(0, 49500, 1000, out.data());
            CHECK(!"read past the end");
        } catch (const source_error & e) {
            CHECK(std::strstr(e.what(), file.path.c_str()) && std::strstr(e.what(), "49500") &&
                  std::strstr(e.what(), "50000"));
        }
    }
}

TEST(a_file_that_is_not_there_is_an_error) {
    for (const int kind : kinds) {
        try {
            const file_source source({ "/nowhere/model.gguf" }, kind);
            CHECK(!"opened");
        } catch (const source_error & e) {
            CHECK(std::strstr(e.what(), "/nowhere/model.gguf"));
        }
    }
}
