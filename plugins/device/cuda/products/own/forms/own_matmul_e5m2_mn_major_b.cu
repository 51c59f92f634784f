#include "products/own/own_matmul_form.cuh"

namespace quern::cuda {

using namespace gemm;
const OwnMatmul kE5m2MnMajorBMatmul =
    own_matmul<TransposingMainloop<OfFloat8<DType::e5m2, DType::e4m3>, true>, OutputLayout::transposed>();

}  // namespace quern::cuda
