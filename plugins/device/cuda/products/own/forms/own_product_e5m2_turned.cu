#include "products/own/own_product_form.cuh"

namespace quern::cuda {

using namespace product;
const OwnProduct kE5m2TurnedProduct =
    own_product<TurningSums<OfFloat8<DType::e5m2, DType::e4m3>, true>, Lies::turned>();

}  // namespace quern::cuda
