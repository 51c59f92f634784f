#include "products/own/own_product_form.cuh"

namespace quern::cuda {

using namespace product;
const OwnProduct kE5m2SquaresProduct =
    own_product<SquaresSums<OfFloat8<DType::e5m2, DType::e4m3>, Rows::along>, Lies::straight>();

}  // namespace quern::cuda
