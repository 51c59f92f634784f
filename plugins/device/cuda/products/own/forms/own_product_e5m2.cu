#include "products/own/own_product_form.cuh"

namespace quern::cuda {

using namespace product;
const OwnProduct kE5m2Product =
    own_product<StraightSums<OfFloat8<DType::e5m2, DType::e4m3>, Columns::along>, Lies::straight>();

}  // namespace quern::cuda
