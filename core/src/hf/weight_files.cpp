#include "hf/weight_files.h"

#include <filesystem>

#include "base/files/json_file.h"
#include "base/shorten.h"
#include "checkpoint/names.h"
#include "quern/error.h"

namespace quern {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr std::size_t kLargestIndex = std::size_t{100} << 20;
constexpr int kIndexDepth = 4;
constexpr const char* kFetchAgain = "download the model again";

[[noreturn]] void refuse(const std::string& where, const std::string& what, const std::string& found,
                         const std::string& expected, const std::string& next) {
  throw Error(ErrorCode::input, {where, what, found, expected, next});
}

// A shard is a plain name beside its index. A link may stay in the directory, or lead to <cache>/blobs as the snapshots
// of a Hugging Face cache do; anything else would let a model name files outside itself.
std::string shard_path(const std::string& index_path, const std::string& name) {
  if (!is_plain_file_name(name))
    refuse(index_path, "shard name", quote_name(name), "a file beside the index", "do not use this model");
  fs::path folder = fs::path(index_path).parent_path();
  std::error_code error;
  fs::path home = fs::canonical(folder.empty() ? "." : folder, error);
  fs::path path = folder / name;
  fs::path target = fs::canonical(path, error);
  if (error)
    refuse(path, "shard is missing", error.message(),
           "a file that " + fs::path(index_path).filename().string() + " lists", kFetchAgain);
  bool in_cache = home.parent_path().filename() == "snapshots" &&
                  target.parent_path() == home.parent_path().parent_path() / "blobs";
  if (target.parent_path() != home && !in_cache)
    refuse(path, "shard is a link out of its directory", quote_name(target.string()), "a file beside the index",
           "do not use this model");
  return path;
}

}  // namespace

WeightFiles::WeightFiles(const std::string& path) : path_(path) {
  std::error_code error;
  fs::path given(path);
  if (!fs::is_directory(given, error)) {
    if (given.extension() == ".json")
      open_index(path);
    else
      open_file(path);
    return;
  }
  auto has = [&](const char* name) {
    const bool found = fs::exists(given / name, error);
    if (error) refuse(given / name, "cannot be read", error.message(), "a readable file", "check its permissions");
    return found;
  };
  if (has(kSingle)) {
    open_file(given / kSingle);
    return;
  }
  if (has(kIndex)) {
    open_index(given / kIndex);
    return;
  }
  bool pickled =
      fs::exists(given / "pytorch_model.bin", error) || fs::exists(given / "pytorch_model.bin.index.json", error);
  refuse(path, "no weights", pickled ? "pytorch_model.bin" : "", std::string(kSingle) + " or " + kIndex,
         pickled ? "convert the model to safetensors" : "give the directory of a Hugging Face model");
}

void WeightFiles::open_file(const std::string& path) {
  const auto& file = files_.emplace_back(std::make_unique<SafetensorsFile>(path));
  for (const StoredTensor& tensor : file->tensors()) {
    auto [at, fresh] = tensors_.try_emplace(tensor.name, Tensor{file.get(), &tensor});
    if (!fresh)
      refuse(path, "tensor " + quote_name(tensor.name) + " is in two shards", at->second.file->path(),
             "each tensor once", kFetchAgain);
  }
}

void WeightFiles::open_index(const std::string& index_path) {
  json index = read_strict_json(index_path, kLargestIndex, kIndexDepth);
  auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object() || map->empty())
    refuse(index_path, "weight_map", "nothing", "an object of tensor names and shards", kFetchAgain);
  std::map<std::string, std::string> shards;  // name -> path
  for (const auto& item : map->items()) {
    if (!item.value().is_string())
      refuse(index_path, "shard of tensor " + quote_name(item.key()), item.value().type_name(), "a file name",
             kFetchAgain);
    const auto& name = item.value().get_ref<const std::string&>();
    if (shards.find(name) == shards.end()) shards.emplace(name, shard_path(index_path, name));
  }
  for (const auto& [name, path] : shards) open_file(path);

  std::vector<std::string> absent, unlisted;
  for (const auto& item : map->items()) {
    Tensor tensor = find(item.key());
    if (tensor.file == nullptr || tensor.file->path() != shards[item.value().get<std::string>()])
      absent.push_back(item.key());
  }
  for (const auto& [name, tensor] : tensors_)
    if (map->find(name) == map->end()) unlisted.push_back(name);
  if (!absent.empty())
    refuse(index_path, "tensors are not in the shard that the index states", list_names(absent), "", kFetchAgain);
  if (!unlisted.empty())
    refuse(index_path, "shards hold tensors that the index does not list", list_names(unlisted), "", kFetchAgain);
}

WeightFiles::Tensor WeightFiles::find(std::string_view name) const {
  auto found = tensors_.find(name);
  return found == tensors_.end() ? Tensor{} : found->second;
}

}  // namespace quern
