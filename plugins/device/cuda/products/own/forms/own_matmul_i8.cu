#include "products/own/own_matmul_form.cuh"

namespace quern::cuda {

using namespace gemm;
const OwnMatmul kI8Matmul = own_matmul<StraightMainloop<OfI8, Columns::k_major>, OutputLayout::straight>();

}  // namespace quern::cuda
