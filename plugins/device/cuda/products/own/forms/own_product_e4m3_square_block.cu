#include "products/own/own_product_form.cuh"

namespace quern::cuda {

using namespace product;
const OwnProduct kE4m3SquareBlockProduct =
    own_product<RescalingSums<OfFloat8<DType::e4m3, DType::e4m3>, true>, Lies::straight>();

}  // namespace quern::cuda
