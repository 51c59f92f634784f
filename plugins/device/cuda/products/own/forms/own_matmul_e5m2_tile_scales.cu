#include "products/own/own_matmul_form.cuh"

namespace quern::cuda {

using namespace gemm;
const OwnMatmul kE5m2TileScalesMatmul =
    own_matmul<TileScalesMainloop<OfFloat8<DType::e5m2, DType::e4m3>, Rows::k_major>, OutputLayout::straight>();

}  // namespace quern::cuda
