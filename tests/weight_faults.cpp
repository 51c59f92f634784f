// Faults of the safetensors files and indexes that train.from names.
#include <cstring>
#include <filesystem>
#include <limits>

#include <doctest/doctest.h>

#include "faults.h"

namespace quern::testing {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Arguments = std::vector<std::string>;

const char* const kNorm = "model.norm.weight";

struct Weights {
  json header;
  std::string data;
  std::string bytes(const std::string& header_text) const {
    const std::uint64_t length = header_text.size();
    std::string text(8, '\0');
    std::memcpy(text.data(), &length, 8);
    return text + header_text + data;
  }
  std::string bytes() const { return bytes(header.dump()); }
  std::size_t begin_of(const std::string& name) const { return header.at(name).at("data_offsets").at(0); }
};

// What a run of the tiny model exports.
const Weights& good_weights() {
  static const Weights weights = [] {
    TinyFiles files;
    REQUIRE(quern_train(files, {"train.steps=1", "checkpoint.every=0", "checkpoint.at_end=false"}).code == 0);
    const std::string bytes = read_text(files.at("run") + "/export/model.safetensors");
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    return Weights{json::parse(bytes.substr(8, length)), bytes.substr(8 + length)};
  }();
  return weights;
}

Arguments train_from(const TinyFiles& files) { return train_arguments(files, {"train.from=" + files.at("model")}); }

void write_weights(const TinyFiles& files, const std::string& name, const std::string& bytes) {
  fs::create_directories(files.at("model"));
  write_text(files.at("model/") + name, bytes);
}

// model/model.safetensors with those bytes.
std::function<Arguments(const TinyFiles&)> bytes(const std::function<std::string(const Weights&)>& damaged) {
  return [damaged](const TinyFiles& files) {
    write_weights(files, "model.safetensors", damaged(good_weights()));
    return train_from(files);
  };
}

std::function<Arguments(const TinyFiles&)> changed(const std::function<void(Weights&)>& change) {
  return bytes([change](Weights weights) {
    change(weights);
    return weights.bytes();
  });
}

// The entry of model.norm.weight with another `key`.
std::function<Arguments(const TinyFiles&)> norm_with(const std::string& key, const json& value) {
  return changed([=](Weights& weights) { weights.header[kNorm][key] = value; });
}

std::function<Arguments(const TinyFiles&)> norm_moved(std::int64_t begin, std::int64_t end) {
  return changed([=](Weights& weights) {
    json& offsets = weights.header[kNorm]["data_offsets"];
    offsets = {offsets[0].get<std::int64_t>() + begin, offsets[1].get<std::int64_t>() + end};
  });
}

std::string length_word(std::uint64_t length) { return {reinterpret_cast<const char*>(&length), sizeof length}; }

// An index that says where model.norm.weight is, and one.safetensors with the whole model.
std::function<Arguments(const TinyFiles&)> index(const std::string& shard) {
  return [shard](const TinyFiles& files) {
    write_weights(files, "one.safetensors", good_weights().bytes());
    write_text(files.at("secret.safetensors"), good_weights().bytes());
    fs::create_symlink("../secret.safetensors", files.at("model/link.safetensors"));
    json map;
    for (const auto& item : good_weights().header.items())
      if (item.key() != "__metadata__") map[item.key()] = "one.safetensors";
    map[kNorm] = shard;
    write_weights(files, "model.safetensors.index.json", json{{"weight_map", map}}.dump());
    return train_from(files);
  };
}

std::vector<Fault> file_faults() {
  const std::string file = "model/model.safetensors", damaged = "the file is damaged or was made by a faulty tool",
                    again = "fetch or make the file again";
  return {
      {"header longer than the file",
       3,
       {file, "truncated", "a header of 1000000 bytes", again},
       bytes([](const Weights& w) { return length_word(1000000) + w.bytes().substr(8); })},
      {"header over the cap",
       3,
       {file, "header length: found 1099511627776 bytes, expected at most 104857600", again},
       bytes([](const Weights& w) { return length_word(std::uint64_t{1} << 40) + w.bytes().substr(8); })},
      {"file cut short",
       3,
       {file, "ends behind the file's end", "expected at most", damaged},
       bytes([](const Weights& w) { return w.bytes().substr(0, w.bytes().size() - 100); })},
      {"bytes behind the last tensor", 3, {file, "bytes after the last tensor", damaged}, bytes([](const Weights& w) {
         return w.bytes() + "x";
       })},
      {"header that is not UTF-8", 3, {file, "not valid JSON", "UTF-8", damaged}, bytes([](const Weights& w) {
         return w.bytes("{\"\xff\xfe\": 1}");
       })},
      {"header nested too deeply",
       3,
       {file, "JSON nested too deep: found more than 3 levels", damaged},
       bytes([](const Weights& w) { return w.bytes("{\"a\":" + std::string(1000, '[')); })},
      {"a tensor twice",
       3,
       {file, "a name stands twice in JSON: found 'model.norm.weight'", damaged},
       bytes([](const Weights& w) {
         return w.bytes("{\"model.norm.weight\":" + w.header.at(kNorm).dump() + "," + w.header.dump().substr(1));
       })},
      {"tensors that overlap", 3, {file, "tensor 'model.norm.weight': overlaps", damaged}, norm_moved(-4, -4)},
      {"a hole between tensors", 3, {file, "'model.norm.weight': leaves a hole before it", damaged}, norm_moved(4, 4)},
      {"a negative offset",
       3,
       {file, "'model.norm.weight': data_offsets: found -4, expected whole numbers", damaged},
       norm_with("data_offsets", {-4, 124})},
      {"offsets the wrong way round",
       3,
       {file, "found 128 to 0, expected an end not before the begin", damaged},
       norm_with("data_offsets", {128, 0})},
      {"a shape whose product overflows",
       3,
       {file, "shape: found (4294967296, 4294967296), expected a size that fits into 63 bits", damaged},
       norm_with("shape", {std::int64_t{1} << 32, std::int64_t{1} << 32})},
      {"a size unlike shape and type",
       3,
       {file, "'model.norm.weight': size does not agree with its shape: found 128 bytes, expected 132", damaged},
       norm_with("shape", {33})},
      {"unknown element type",
       3,
       {file, "'model.norm.weight': dtype: found 'F31', expected one of F64", damaged},
       norm_with("dtype", "F31")},
      {"no such file",
       3,
       {"no weights", "expected model.safetensors"},
       [](const TinyFiles& files) {
         fs::create_directories(files.at("model"));
         return train_from(files);
       }},
  };
}

std::vector<Fault> tensor_faults() {
  const std::string file = "model/model.safetensors", belongs = "check that config.json belongs to these weights";
  return {
      {"missing tensors", 3, {"1 tensors are missing: 'model.norm.weight'", belongs}, changed([](Weights& weights) {
         weights.header["model.rotary_emb.inv_freq"] = weights.header[kNorm];
         weights.header.erase(kNorm);
       })},
      {"tensors that are not the model's",
       3,
       {"1 tensors are not part of the model: found 'model.extra'", belongs},
       changed([](Weights& weights) {
         weights.header["model.extra"] = {{"dtype", "U8"}, {"shape", {0}}, {"data_offsets", {0, 0}}};
       })},
      {"a tensor of another shape",
       3,
       {file, "'model.norm.weight': found (16, 2), expected (32)", belongs},
       norm_with("shape", {16, 2})},
      {"a tensor of integers",
       3,
       {file, "'model.norm.weight': found I32, expected a floating type", "use the unquantized model"},
       norm_with("dtype", "I32")},
      {"NaN and infinite weights",
       3,
       {file, "2 of 32 elements of tensor 'model.norm.weight' are not finite, the first at element 3: found nan",
        "expected finite numbers", "fetch the model again"},
       changed([](Weights& weights) {
         for (auto [element, bad] : {std::pair(3, std::numeric_limits<float>::quiet_NaN()),
                                     std::pair(31, std::numeric_limits<float>::infinity())})
           std::memcpy(&weights.data[weights.begin_of(kNorm) + 4 * element], &bad, 4);
       })},
      {"an index that leads up and out",
       3,
       {"model.safetensors.index.json: shard name: found '../secret.safetensors', expected a file beside the index",
        "do not use this model"},
       index("../secret.safetensors")},
      {"an index with an absolute path",
       3,
       {"index.json: shard name: found '/etc/hostname'", "do not use this model"},
       index("/etc/hostname")},
      {"a shard that is a link out of the directory",
       3,
       {"model/link.safetensors: shard is a link out of its directory", "expected a file beside the index",
        "do not use this model"},
       index("link.safetensors")},
      {"a missing shard",
       3,
       {"model/two.safetensors: shard is missing", "fetch the model again"},
       index("two.safetensors")},
  };
}

}  // namespace

std::vector<Fault> weight_faults() {
  std::vector<Fault> faults = file_faults();
  for (Fault& fault : tensor_faults()) faults.push_back(std::move(fault));
  return faults;
}

}  // namespace quern::testing

using namespace quern::testing;

TEST_CASE("valid oddities of weights are trained from") {
  auto trains = [](const std::string& bytes) {
    TinyFiles files;
    write_weights(files, "model.safetensors", bytes);
    Outcome outcome = quern_train(files, {"train.from=" + files.at("model"), "train.steps=1"});
    CAPTURE(outcome.err);
    CHECK(outcome.code == 0);
  };
  Weights weights = good_weights();
  trains(weights.bytes(weights.header.dump() + std::string(1000, ' ')));
  weights.header.erase("__metadata__");
  trains(weights.bytes(weights.header.dump(4) + "\n"));
  // An empty tensor, which a rope buffer may be, and one of a single number.
  weights.header["a.rotary_emb.inv_freq"] = {{"dtype", "BF16"}, {"shape", {3, 0}}, {"data_offsets", {0, 0}}};
  const std::size_t end = weights.data.size();
  weights.header["b.rotary_emb.inv_freq"] = {
      {"dtype", "F32"}, {"shape", json::array()}, {"data_offsets", {end, end + 4}}};
  weights.data += std::string(4, '\0');
  trains(weights.bytes());
}
