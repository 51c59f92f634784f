// model.safetensors.index.json over two sound shards, a file outside and a link to it, which must not be read.
#include <filesystem>

#include "fuzz.h"
#include "hf/weight_files.h"

using namespace quern;

namespace {

void write_shard(const std::string& path, const std::vector<std::string>& names) {
  std::vector<TensorDeclaration> declared;
  for (const std::string& name : names) declared.push_back({name, StoredType::u8, {1}});
  SafetensorsWriter writer(path, declared);
  writer.write(std::vector<std::byte>(names.size()));
  writer.finish();
}

std::string model_directory() {
  std::string directory = fuzz::scratch() / "model";
  std::filesystem::create_directory(directory);
  write_shard(directory + "/one.safetensors", {"a", "b"});
  write_shard(directory + "/two.safetensors", {"c"});
  write_shard(fuzz::scratch() / "secret.safetensors", {"secret"});
  std::filesystem::create_symlink("../secret.safetensors", directory + "/link.safetensors");
  return directory;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string directory = model_directory();
  fuzz::file("model/model.safetensors.index.json", fuzz::text(data, size));
  fuzz::accepted({ErrorCode::input}, [&] {
    WeightFiles files(directory);
    for (const auto& [name, tensor] : files.tensors())
      if (name != "a" && name != "b" && name != "c") fuzz::fail("a tensor of another file was read", name);
  });
  return 0;
}
