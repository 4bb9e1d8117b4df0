// What racecheck makes of a message that one lane hands over for its warp. Built and run with
//
//     nvcc -arch=sm_90 -o handover bench/handover.cu
//     compute-sanitizer --tool racecheck ./handover MODE
//
// Warp 0 writes a word a lane and arrives on an mbarrier; warp 1 waits on it, reads the words and
// arrives on another, which warp 0 waits on before it writes again: a ring of one slot. MODE:
//
//   0  every lane arrives (a barrier counts 32)
//   1  __syncwarp, then lane 0 arrives (counts 1), as the kernels do
//   2  as 1, of one round, and warp 1 does not wait
//
// In 0 and 1 each read comes after its write: an arrival releases, the wait acquires, and
// __syncwarp orders a lane's accesses before the arrival of another lane (PTX ISA, memory
// consistency model, causality order). In 2 none does.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

constexpr int WARP = 32, ROUNDS = 4;

__device__ uint32_t at(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void open(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(barrier)), "r"(count) : "memory");
}

__device__ void wait(uint64_t *barrier, int phase) {
    int done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(at(barrier)), "r"(phase)
                     : "memory");
}

__device__ void arrive(uint64_t *barrier, int mode, int lane) {
    if (mode) __syncwarp();
    if (mode == 0 || lane == 0)
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at(barrier)) : "memory");
}

__global__ void handover(int mode, int *out) {
    __shared__ int words[WARP];
    __shared__ uint64_t full, empty;
    int lane = threadIdx.x % WARP, sum = 0;
    if (threadIdx.x == 0) {
        open(&full, mode ? 1 : WARP);
        open(&empty, mode ? 1 : WARP);
    }
    __syncthreads();
    for (int round = 0; round < (mode == 2 ? 1 : ROUNDS); round++) {
        if (threadIdx.x < WARP) {
            if (round) wait(&empty, (round - 1) % 2);
            words[lane] = lane + round;
            arrive(&full, mode, lane);
        } else {
            if (mode < 2) wait(&full, round % 2);
            sum += words[lane];
            arrive(&empty, mode, lane);
        }
    }
    if (threadIdx.x >= WARP) out[lane] = sum;
}

int main(int argc, char **argv) {
    int *out, wrong = 0, mode = argc > 1 ? atoi(argv[1]) : 0;
    cudaMallocManaged(&out, WARP * sizeof(int));
    handover<<<1, 2 * WARP>>>(mode, out);
    if (cudaDeviceSynchronize() != cudaSuccess) return 2;
    for (int i = 0; i < WARP; i++) wrong += out[i] != ROUNDS * i + ROUNDS * (ROUNDS - 1) / 2;
    printf("mode %d: %d words wrong\n", mode, wrong);
    return 0;
}
