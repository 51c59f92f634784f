#include "products/own/own_product_form.cuh"

namespace quern::cuda {

using namespace product;
const OwnProduct kE5m2BlockProduct =
    own_product<RescalingSums<OfFloat8<DType::e5m2, DType::e4m3>, false>, Lies::straight>();

}  // namespace quern::cuda
