/* t_cublas.cpp - the harness's cuBLASLt keeps the rules of cublas_rules.h, and what coc.h promises of it. */
#include "coc.h"
#include "cublas_rules.h"

namespace {

TEST(rules) {
    cublasLtHandle_t handle = NULL;
    CHECK_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
    for (const blas_case &c : blas_cases) {
        std::string found = blas_run(handle, c);
        CHECK_MSG(found.empty(), "%s (%s): %s", c.rule, c.source, found.c_str());
    }
    CHECK_EQ(cublasLtDestroy(handle), CUBLAS_STATUS_SUCCESS);
    std::string faults = coc_take_faults();
    CHECK_MSG(faults.empty(), "%s", faults.c_str());
}

} // namespace

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(rules);
    return TEST_END();
}
