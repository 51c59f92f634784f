#include "products/own/own_matmul_form.cuh"

namespace quern::cuda {

using namespace gemm;
const OwnMatmul kE4m3MnMajorAMatmul =
    own_matmul<TransposingMainloop<OfFloat8<DType::e4m3, DType::e4m3>, true>, OutputLayout::paired>();

}  // namespace quern::cuda
