#include "products/own/own_matmul_form.cuh"

namespace quern::cuda {

using namespace gemm;
const OwnMatmul kBf16MnMajorABMatmul =
    own_matmul<StraightMainloop<OfBf16, Columns::mn_major, Rows::mn_major>, OutputLayout::straight>();

}  // namespace quern::cuda
