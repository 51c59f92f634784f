#include "products/own/own_matmul_form.cuh"

namespace quern::cuda {

using namespace gemm;
const OwnMatmul kE5m2Matmul =
    own_matmul<StraightMainloop<OfFloat8<DType::e5m2, DType::e4m3>, Columns::k_major>, OutputLayout::straight>();

}  // namespace quern::cuda
