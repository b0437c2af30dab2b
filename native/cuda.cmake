# What the CUDA module needs beyond upstream's own rules, for toolkits of 12 and 13 that are not whole:
# cuBLAS from elsewhere, no driver library at hand, and code for more cards than the one in this machine.

# Without CMAKE_CUDA_ARCHITECTURES upstream builds for this machine's card alone where GGML_NATIVE is on,
# and else for the usual ones of the toolkit's version. Read here by ggml-cuda only: the CPU is done.
set(GGML_NATIVE OFF)
set(GGML_CUDA_NCCL OFF) # serves weights split over cards by rows, which we never ask for

if (SPECULOE_CUBLAS)
    file(GLOB CUDA_cublas_LIBRARY ${SPECULOE_CUBLAS}/lib/libcublas.so*)
    file(GLOB CUDA_cublasLt_LIBRARY ${SPECULOE_CUBLAS}/lib/libcublasLt.so*)
    if (NOT CUDA_cublas_LIBRARY OR NOT EXISTS ${SPECULOE_CUBLAS}/include/cublas_v2.h)
        message(FATAL_ERROR "SPECULOE_CUBLAS=${SPECULOE_CUBLAS} has no lib/libcublas.so* or no include/cublas_v2.h")
    endif()
endif()

find_package(CUDAToolkit 12 REQUIRED)
if (NOT TARGET CUDA::cublas)
    message(FATAL_ERROR "this CUDA toolkit has no cuBLAS; install its package, or name one with SPECULOE_CUBLAS")
endif()
if (NOT TARGET CUDA::cuda_driver)
    # Upstream's memory pool would use the driver directly; the one it has beside needs the runtime alone.
    message(STATUS "no libcuda to link: CUDA without virtual memory management")
    set(GGML_CUDA_NO_VMM ON)
endif()

# The module finds what it was linked with: the toolkit where it lies, packages of PyPI beside ours.
function(finish_cuda target)
    if (SPECULOE_CUBLAS)
        target_include_directories(${target} SYSTEM PRIVATE ${SPECULOE_CUBLAS}/include)
    endif()
    set_target_properties(${target} PROPERTIES INSTALL_RPATH
        "$ORIGIN;$ORIGIN/../../../nvidia/cu13/lib;$ORIGIN/../../../nvidia/cublas/lib;${CUDAToolkit_LIBRARY_DIR}")
endfunction()
