#include "runtime/hopper_kernels.h"

#include "products/own/own_matmul.h"
#include "products/swiglu/swiglu_matmul.h"
#include "quern/error.h"

namespace quern::cuda {

#ifdef QUERN_HOPPER

bool has_hopper_kernels() { return true; }

const HopperKernels& hopper_kernels() {
  static constexpr HopperKernels kKernels{.load_own_matmul = load_own_matmul,
                                          .run_own_matmul = run_own_matmul,
                                          .attention_workspace = wgmma_attention_workspace,
                                          .load_attention = load_wgmma_attention,
                                          .attention = wgmma_attention,
                                          .attention_grad_workspace = wgmma_attention_grad_workspace,
                                          .load_attention_grad = load_wgmma_attention_grad,
                                          .attention_grad = wgmma_attention_grad,
                                          .add_ops = add_swiglu_matmul_ops};
  return kKernels;
}

#else

bool has_hopper_kernels() { return false; }

const HopperKernels& hopper_kernels() { fail_internal("device cuda", "a kernel of Hopper in a build without sm_90a"); }

#endif

}  // namespace quern::cuda
