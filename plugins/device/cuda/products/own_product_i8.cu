#include "products/own_product_form.cuh"

namespace quern::cuda {

using Form = product::OwnProductForm<product::OfI8>;
const OwnProduct kI8Product{Form::load, Form::run};

}  // namespace quern::cuda
