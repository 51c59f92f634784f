#include "products/swiglu/swiglu_matmul.h"

#include "products/swiglu/swiglu_epilogues.cuh"

namespace quern::cuda {

using namespace gemm;

namespace {

struct Bf16Arguments {
  int rows, width;
  const bf16* of;                     ///< gate_up, for the gradient
  bf16 *gate_up, *y, *dy, *dgate_up;  ///< null: not wanted
};

/// kWithY: the gradient may have to give y too.
template <bool kWithY>
class ToBf16 : public ByUnit {
 public:
  using Arguments = Bf16Arguments;
  static constexpr std::uint32_t kShared = 0;
  static constexpr Rows kRows = Rows::k_major;
  static __device__ bool idle(const Arguments&) { return false; }
  static __device__ __forceinline__ const bf16* gate_up(const Arguments& a) { return a.of; }

  __device__ ToBf16(const Arguments& arguments, std::uint32_t) : a_(arguments) {}

  __device__ __forceinline__ float scale(float sum) const { return sum; }

  __device__ __forceinline__ void swiglu(const ValueUnit& unit, const Pack<bf16>& gate, const Pack<bf16>& up,
                                         const Pack<bf16>& y) const {
    store(a_.gate_up, unit.at(2 * a_.width), gate, unit);
    store(a_.gate_up, unit.at(2 * a_.width) + a_.width, up, unit);
    store(a_.y, unit.at(a_.width), y, unit);
  }

  __device__ __forceinline__ void gradient(const ValueUnit& unit, const Pack<bf16>& dy, const Pack<bf16>& y,
                                           const Pack<bf16>& dgate, const Pack<bf16>& dup) const {
    store(a_.dgate_up, unit.at(2 * a_.width), dgate, unit);
    store(a_.dgate_up, unit.at(2 * a_.width) + a_.width, dup, unit);
    store(a_.dy, unit.at(a_.width), dy, unit);
    if (kWithY) store(a_.y, unit.at(a_.width), y, unit);
  }
  __device__ void end() {}

 private:
  const Arguments& a_;
};

using Swiglu = SwigluEpilogue<ToBf16<false>, 8>;
template <bool kWithY>
using SwigluGrad = SwigluGradEpilogue<ToBf16<kWithY>, 12>;

template <Columns kLayout, class EpilogueOp>
using Bf16Launch = FusedLaunch<StraightMainloop<OfBf16, kLayout, EpilogueOp::kRows>, EpilogueOp>;

template <Columns kLayout>
void load_gradient() {
  Bf16Launch<kLayout, SwigluGrad<false>>::load();
  Bf16Launch<kLayout, SwigluGrad<true>>::load();
}

template <Columns kLayout>
void run_gradient(const SwigluMatmulShape& s, const SwigluGradMatmul& p, int multiprocessors, cudaStream_t stream) {
  using EpilogueOp = SwigluGrad<false>;
  const Bf16Arguments arguments{.rows = static_cast<int>(s.rows),
                                .width = static_cast<int>(s.width),
                                .of = static_cast<const bf16*>(p.gate_up),
                                .gate_up = nullptr,
                                .y = static_cast<bf16*>(p.y),
                                .dy = static_cast<bf16*>(p.dy),
                                .dgate_up = static_cast<bf16*>(p.dgate_up)};
  Operands operands{};
  if constexpr (kLayout == Columns::mn_major)
    set_mn_major(operands, s.width, s.depth, p.weight, 0, EpilogueOp::kColumns);
  else
    set_k_major(operands, DType::bf16, s.width, s.depth, p.weight, 0, EpilogueOp::kColumns);
  const auto run = p.y != nullptr ? Bf16Launch<kLayout, SwigluGrad<true>>::run : Bf16Launch<kLayout, EpilogueOp>::run;
  run({s.rows, s.width, s.depth}, operands, DType::bf16, p.dout, arguments, multiprocessors, stream);
}

}  // namespace

bool wgmma_takes(const SwigluMatmulShape& s) {
  return s.width % kPack<bf16> == 0 && s.depth % kPack<bf16> == 0 && s.depth > 0 && s.rows < kMostElements &&
         s.depth < kMostElements && 2 * s.width < kMostElements &&
         ceil_divide(s.rows, kRows) * ceil_divide(s.width, Swiglu::kWidth) < kMostElements;
}

void load_swiglu_matmuls() {
  Bf16Launch<Columns::k_major, Swiglu>::load();
  load_gradient<Columns::k_major>();
  load_gradient<Columns::mn_major>();
}

void swiglu_matmul(const SwigluMatmulShape& s, const SwigluMatmul& p, int multiprocessors, cudaStream_t stream) {
  if (s.rows == 0 || s.width == 0) return;
  Operands operands{};
  for (int half = 0; half < 2; ++half) {
    operands.b[half] =
        tensor_map(DType::bf16, {s.depth, s.width, 1}, static_cast<const bf16*>(p.weight) + half * s.width * s.depth,
                   {OfBf16::kDepth, Swiglu::kWidth, 1});
    operands.b_step[half] = Swiglu::kWidth;
  }
  Bf16Launch<Columns::k_major, Swiglu>::run({s.rows, s.width, s.depth}, operands, DType::bf16, p.x,
                                            {.rows = static_cast<int>(s.rows),
                                             .width = static_cast<int>(s.width),
                                             .of = nullptr,
                                             .gate_up = static_cast<bf16*>(p.gate_up),
                                             .y = static_cast<bf16*>(p.y),
                                             .dy = nullptr,
                                             .dgate_up = nullptr},
                                            multiprocessors, stream);
}

void swiglu_grad_matmul(const SwigluMatmulShape& s, const SwigluGradMatmul& p, int multiprocessors,
                        cudaStream_t stream) {
  if (s.rows == 0 || s.width == 0) return;
  const auto run = s.transposed ? run_gradient<Columns::k_major> : run_gradient<Columns::mn_major>;
  run(s, p, multiprocessors, stream);
}

}  // namespace quern::cuda
