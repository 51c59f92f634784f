#include "products/own/own_matmul_form.cuh"

namespace quern::cuda {

using namespace gemm;
const OwnMatmul kE4m3Matmul =
    own_matmul<StraightMainloop<OfFloat8<DType::e4m3, DType::e4m3>, Columns::k_major>, OutputLayout::straight>();

}  // namespace quern::cuda
