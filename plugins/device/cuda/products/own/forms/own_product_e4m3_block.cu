#include "products/own/own_product_form.cuh"

namespace quern::cuda {

using namespace product;
const OwnProduct kE4m3BlockProduct =
    own_product<RescalingSums<OfFloat8<DType::e4m3, DType::e4m3>, false>, Lies::straight>();

}  // namespace quern::cuda
