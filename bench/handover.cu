// What racecheck makes of a message that one lane hands over for its warp. Built and run with
//
//     nvcc -arch=sm_90 -o handover bench/handover.cu
//     compute-sanitizer --tool racecheck ./handover N      (N: one of the modes below)
//
// Warp 0 writes a word a lane and arrives on an mbarrier; warp 1 waits on it and reads the words.
//   0  every lane arrives (the barrier counts 32)
//   1  __syncwarp, then lane 0 arrives (counts 1), as the kernels do
//   2  as 1, and warp 1 does not wait
// In 0 and 1 each read is ordered after its write: an arrival releases, the wait acquires, and
// __syncwarp orders a lane's write before another lane's arrival (PTX ISA, memory consistency
// model, causality order). In 2 none is.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

constexpr int WARP = 32;

__device__ uint32_t at(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at(barrier)) : "memory");
}

__device__ void wait(uint64_t *barrier) {
    asm volatile("{\n.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared.b64 done, [%0], 0;\n"
                 "@!done bra again;\n}" ::"r"(at(barrier))
                 : "memory");
}

__global__ void handover(int mode, int *out) {
    __shared__ int words[WARP];
    __shared__ uint64_t barrier;
    int lane = threadIdx.x % WARP;
    if (threadIdx.x == 0)
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(&barrier)), "r"(mode ? 1 : WARP));
    __syncthreads();
    if (threadIdx.x < WARP) {
        words[lane] = lane + 1;
        if (mode) __syncwarp();
        if (mode == 0 || lane == 0) arrive(&barrier);
    } else {
        if (mode < 2) wait(&barrier);
        out[lane] = words[lane];
    }
}

int main(int argc, char **argv) {
    int *out, wrong = 0;
    cudaMallocManaged(&out, WARP * sizeof(int));
    handover<<<1, 2 * WARP>>>(argc > 1 ? atoi(argv[1]) : 0, out);
    if (cudaDeviceSynchronize() != cudaSuccess) return 2;
    for (int i = 0; i < WARP; i++) wrong += out[i] != i + 1;
    printf("%d words wrong\n", wrong);
    return 0;
}
