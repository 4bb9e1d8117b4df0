// One forward or backward of CUTLASS's Hopper attention example (number 88), and nothing else:
// what bench/compile_time.py has nvcc compile. Head dim 128, fp32 accumulators, bf16; the backward
// is fp16, since the example's last kernel has no conversion to bf16.
//
//   -I cutlass/include -I cutlass/tools/util/include -I cutlass/examples/88_hopper_fmha
//   -DFUSION=Plain|Causal|Softcap|LinearBias|Window   -DBACKWARD=0|1
//
// A fusion of the example is a functor without members that sees a fragment of scores and its
// (query, key) coordinates, before the softmax scale: so a softcap and a bias hold their constants,
// and the bias has one slope, since a fusion is not told the head. The example begins each row of
// tiles at its first key, so the window masks what it does not skip.

#include "cutlass/cutlass.h"
#include "cutlass/kernel_hardware_info.h"
#include "collective/fmha_fusion.hpp"
#include "device/device_universal.hpp"
#if BACKWARD
#include "device/fmha_device_bwd.hpp"
#else
#include "kernel/fmha_kernel_builder.hpp"
#endif

namespace variants {

using namespace cute;
using cutlass::fmha::collective::CausalFusion;
using cutlass::fmha::collective::DefaultFusion;
using cutlass::fmha::collective::ResidualFusion;

constexpr float kScale = 0.08838834764831845f;  // 1 / sqrt(128)

using Plain = ResidualFusion;
using Causal = CausalFusion;

// Every block is a masked one for these: the example calls a fusion on no other.
template <class Change>
struct EachScore : DefaultFusion {
  template <class Scores, class Index, class ProblemSize>
  CUTLASS_DEVICE void before_softmax(
      Scores& scores, Index const& index, ProblemSize const& problem_size) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(scores); i++) {
      auto position = index(i);
      int q = get<0>(position), kv = get<1>(position);
      scores(i) = kv < get<3>(problem_size) ? Change{}(scores(i), q, kv) : -INFINITY;
    }
  }
};

struct CapScore {
  CUTLASS_DEVICE float operator()(float score, int, int) const {
    constexpr float cap = 30.f / kScale;
    return cap * cutlass::fast_tanh(score / cap);
  }
};

struct BiasScore {
  CUTLASS_DEVICE float operator()(float score, int q, int kv) const {
    return score + (0.0625f / kScale) * float(kv - q);
  }
};

struct WindowScore {
  CUTLASS_DEVICE float operator()(float score, int q, int kv) const {
    return kv <= q && kv >= q - 1024 ? score : -INFINITY;
  }
};

using Softcap = EachScore<CapScore>;
using LinearBias = EachScore<BiasScore>;
using Window = EachScore<WindowScore>;

#if BACKWARD
using Operation = cutlass::fmha::device::FmhaBwd<
    cutlass::half_t, float, Shape<_64, _128, _128>, FUSION>;
#else
using Stride = tuple<int, _1, tuple<int, int>>;
using Operation = cutlass::device::Universal<typename cutlass::fmha::kernel::FmhaBuilder<
    cutlass::bfloat16_t, float, float, Shape<_128, _128, _128>, Stride, Stride, Stride, FUSION,
    cutlass::gemm::KernelTmaWarpSpecializedPingpong>::Kernel>;
#endif

}  // namespace variants

cutlass::Status launch(
    variants::Operation::Arguments const& arguments, void* workspace, cudaStream_t stream) {
  variants::Operation operation;
  return operation.run(arguments, workspace, stream);
}
