#include "products/own/own_matmul_form.cuh"

namespace quern::cuda {

using namespace gemm;
const OwnMatmul kE4m3BlockScalesMatmul =
    own_matmul<RescalingMainloop<OfFloat8<DType::e4m3, DType::e4m3>, false>, OutputLayout::straight>();

}  // namespace quern::cuda
