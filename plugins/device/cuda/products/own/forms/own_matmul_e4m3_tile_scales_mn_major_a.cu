#include "products/own/own_matmul_form.cuh"

namespace quern::cuda {

using namespace gemm;
const OwnMatmul kE4m3TileScalesMnMajorAMatmul =
    own_matmul<TileScalesMainloop<OfFloat8<DType::e4m3, DType::e4m3>, Rows::mn_major>, OutputLayout::paired>();

}  // namespace quern::cuda
