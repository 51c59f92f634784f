#include "products/own/own_matmul_form.cuh"

namespace quern::cuda {

using namespace gemm;
const OwnMatmul kBf16Matmul = own_matmul<StraightMainloop<OfBf16, Columns::k_major>, OutputLayout::straight>();

}  // namespace quern::cuda
