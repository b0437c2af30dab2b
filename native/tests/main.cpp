#include "check.h"

#include <cstdio>
#include <cstring>

int main(int argc, char ** argv) {
    int passed = 0, failed = 0;
    for (const auto & [name, run] : all_tests()) {
        if (argc > 1 && !std::strstr(name, argv[1])) {
            continue;
        }
        try {
            run();
            std::printf("ok   %s\n", name);
            passed += 1;
        } catch (const std::exception & e) {
            std::printf("FAIL %s\n     %s\n", name, e.what());
            failed += 1;
        }
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
