// Single files, shards by an index, and indexes that must not be followed.
#include "hf/weight_files.h"

#include <filesystem>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "base/shorten.h"
#include "checkpoint/test_support.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;
namespace fs = std::filesystem;

namespace {

void write_tensors(const std::string& path, const std::vector<std::string>& names) {
  std::vector<TensorDeclaration> declared;
  for (const std::string& name : names) declared.push_back({name, StoredType::f32, {1}});
  SafetensorsWriter writer(path, declared);
  for (float value = 1; value <= static_cast<float>(names.size()); ++value)
    writer.write(std::as_bytes(std::span(&value, 1)));
  writer.finish();
}

std::string index_of(const std::string& map) {
  return "{\"metadata\":{\"total_size\":12},\"weight_map\":{" + map + "}}";
}

}  // namespace

TEST_CASE("a file, a directory and an index are opened alike") {
  TestDirectory directory;
  write_tensors(directory / "one.safetensors", {"a", "b"});
  write_tensors(directory / "two.safetensors", {"c"});
  write_text(directory / "model.safetensors.index.json",
             index_of(R"("a":"one.safetensors","b":"one.safetensors","c":"two.safetensors")"));
  for (const std::string& path : {directory.path(), directory / "model.safetensors.index.json"}) {
    WeightFiles files(path);
    CHECK(files.tensors().size() == 3);
    auto tensor = files.find("b");
    REQUIRE(tensor.file != nullptr);
    CHECK(tensor.file->read_floats("b") == std::vector<float>{2});
    CHECK(files.find("d").file == nullptr);
  }
  CHECK(WeightFiles(directory / "two.safetensors").tensors().size() == 1);
  fs::rename(directory / "two.safetensors", directory / "model.safetensors");
  CHECK(WeightFiles(directory.path()).tensors().size() == 1);  // as transformers does, one file comes before an index
}

TEST_CASE("absent and disagreeing tensors are named") {
  TestDirectory directory;
  const std::string kLoop = "model.safetensors";
  std::string index = directory / "model.safetensors.index.json";
  check_refused(ErrorCode::input, {"no weights: expected model.safetensors"}, [&] { WeightFiles(directory.path()); });
  fs::create_symlink(kLoop, directory / kLoop);
  check_refused(ErrorCode::input, {"cannot be read: found Too many levels of symbolic links"},
                [&] { WeightFiles(directory.path()); });
  fs::remove(directory / kLoop);
  write_text(directory / "pytorch_model.bin", "");
  check_refused(ErrorCode::input, {"convert the model to safetensors"}, [&] { WeightFiles(directory.path()); });
  check_refused(ErrorCode::input, {"cannot be opened"}, [&] { WeightFiles(directory / "none.safetensors"); });
  write_tensors(directory / "one.safetensors", {"a", "b"});
  auto refused = [&](const std::string& words, const std::string& text) {
    write_text(index, text);
    check_refused(ErrorCode::input, {words}, [&] { WeightFiles(directory.path()); });
  };
  refused("one.missing.safetensors: shard is missing",
          index_of(R"("a":"one.safetensors","b":"one.missing.safetensors")"));
  refused("not in the shard that the index states: found 'x'",
          index_of(R"("a":"one.safetensors","b":"one.safetensors","x":"one.safetensors")"));
  refused("does not list: found 'b'", index_of(R"("a":"one.safetensors")"));
  refused("weight_map", "{}");
  refused("weight_map", "[]");
  refused("weight_map", index_of(""));
  refused("found number", index_of("\"a\":1"));
  refused("each name once", index_of(R"("a":"one.safetensors","a":"one.safetensors")"));
  refused("not valid JSON", "{");
  refused("not valid JSON", "");
  write_tensors(directory / "two.safetensors", {"b"});
  refused("'b' is in two shards", index_of(R"("a":"one.safetensors","b":"two.safetensors")"));
}

TEST_CASE("names out of files are made fit for a terminal") {
  for (const char* good : {"model.a", "\u00e4 \u2264 \U0001f600", "\u00a0", ""}) CHECK(printable(good) == good);
  CHECK(printable(std::string_view("a\0b\x1b[2J\x7f\n", 9)) == "a?b?[2J??");
  CHECK(printable("\x80|\xc3|\xc0\xaf|\xed\xa0\x80|\xf5\x80\x80\x80|\xc2\x9b") == "?|?|??|???|????|??");
  CHECK(printable("abc\u00e4", 4) == "abc?...");
}

TEST_CASE("an index cannot name files outside its directory") {
  TestDirectory outside, directory;
  write_tensors(outside / "secret.safetensors", {"a"});
  auto refused = [&](const std::string& words, const std::string& name) {
    write_text(directory / "model.safetensors.index.json", index_of("\"a\":\"" + name + "\""));
    check_refused(ErrorCode::input, {words}, [&] { WeightFiles(directory.path()); });
  };
  refused("shard name", outside / "secret.safetensors");
  refused("shard name", "../" + fs::path(outside.path()).filename().string() + "/secret.safetensors");
  for (const char* name : {"", ".", "..", "sub/one.safetensors", "a\\u0000b"}) refused("shard name", name);
  fs::create_symlink(outside / "secret.safetensors", directory / "link.safetensors");
  refused("a link out of its directory", "link.safetensors");
  // Within the directory, and into the blobs of a Hugging Face cache, links are what people have.
  write_tensors(directory / "one.safetensors", {"a"});
  fs::create_symlink("one.safetensors", directory / "inner.safetensors");
  write_text(directory / "model.safetensors.index.json", index_of(R"("a":"inner.safetensors")"));
  CHECK(WeightFiles(directory.path()).tensors().size() == 1);
  fs::create_directories(directory / "cache/blobs");
  fs::create_directories(directory / "cache/snapshots/main");
  write_tensors(directory / "cache/blobs/0123", {"a"});
  fs::create_symlink("../../blobs/0123", directory / "cache/snapshots/main/one.safetensors");
  write_text(directory / "cache/snapshots/main/model.safetensors.index.json", index_of(R"("a":"one.safetensors")"));
  CHECK(WeightFiles(directory / "cache/snapshots/main").tensors().size() == 1);
}
