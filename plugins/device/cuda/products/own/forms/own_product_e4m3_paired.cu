#include "products/own/own_product_form.cuh"

namespace quern::cuda {

using namespace product;
const OwnProduct kE4m3PairedProduct =
    own_product<TurningSums<OfFloat8<DType::e4m3, DType::e4m3>, true>, Lies::paired>();

}  // namespace quern::cuda
