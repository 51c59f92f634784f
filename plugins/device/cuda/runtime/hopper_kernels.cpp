#include "runtime/hopper_kernels.h"

#include "products/own/own_product.h"
#include "products/swiglu/swiglu_product.h"
#include "quern/error.h"

namespace quern::cuda {

#ifdef QUERN_HOPPER

bool has_hopper_kernels() { return true; }

const HopperKernels& hopper_kernels() {
  static constexpr HopperKernels kKernels{.load_own_product = load_own_product,
                                          .run_own_product = run_own_product,
                                          .attention_grad_workspace = wgmma_attention_grad_workspace,
                                          .load_attention_grad = load_wgmma_attention_grad,
                                          .attention_grad = wgmma_attention_grad,
                                          .add_ops = add_swiglu_product_ops};
  return kKernels;
}

#else

bool has_hopper_kernels() { return false; }

const HopperKernels& hopper_kernels() { fail_internal("device cuda", "a kernel of Hopper in a build without sm_90a"); }

#endif

}  // namespace quern::cuda
