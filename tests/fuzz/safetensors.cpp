// A .safetensors file: whatever is accepted can be read to its last element.
#include "checkpoint/safetensors.h"

#include "fuzz.h"

using namespace quern;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string path = fuzz::file("model.safetensors", fuzz::text(data, size));
  fuzz::accepted({ErrorCode::input}, [&] {
    SafetensorsFile file(path);
    std::uint64_t bytes = 0;
    for (const StoredTensor& tensor : file.tensors()) {
      if (file.find(tensor.name) != &tensor) fuzz::fail("a tensor is not found by its name", tensor.name);
      bytes += file.bytes(tensor).size();
      if (is_floating(tensor.type)) file.read_floats(tensor.name);
    }
    if (bytes > size) fuzz::fail("tensors share bytes", std::to_string(bytes));
  });
  return 0;
}
