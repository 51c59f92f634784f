// A checkpoint's state.json beside a sound tensors file. Its own checksum is made to agree, so that later checks are
// reached too: the position in the data is loaded, the config compared, and the state written again.
#include <filesystem>
#include <memory>

#include <nlohmann/json.hpp>

#include "base/checksum.h"
#include "checkpoint/changes.h"
#include "checkpoint/checkpoint_store.h"
#include "data/sources/token_source.h"
#include "fuzz.h"

using namespace quern;
using nlohmann::json;

namespace {

std::string with_own_checksum(std::string_view text) {
  json state = json::parse(text.begin(), text.end(), nullptr, false);
  if (!state.is_object() || !state.contains("xxh3")) return std::string(text);
  state.erase("xxh3");
  try {
    const std::string rest = state.dump();
    state["xxh3"] = checksum_text(checksum_of(std::as_bytes(std::span(rest))));
    return state.dump();
  } catch (const json::exception&) {  // not UTF-8
    return std::string(text);
  }
}

std::string run_directory() {
  std::vector<float> values{1, 2};
  CheckpointMeta meta;
  meta.step = 7;
  write_checkpoint(fuzz::scratch() / "run", meta, {{"a", {values.data(), DType::f32, {2}}}});
  return fuzz::scratch() / "run";
}

/// Of one file, and of two with weights and documents.
std::vector<std::unique_ptr<TokenFileSource>> data_sources() {
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 50, .separator = 3};
  for (int i = 0; i < 41; ++i) content.tokens.push_back(i % 7);
  const std::string path = fuzz::scratch() / "train.tok";
  write_token_file(path, content);
  std::vector<std::unique_ptr<TokenFileSource>> sources;
  for (const TokenFileOptions& options :
       {TokenFileOptions{.entries = {{path}}, .where = "data"},
        TokenFileOptions{.entries = {{path}, {path}}, .weights = {1, 2}, .documents = true, .where = "data"}})
    sources.push_back(std::make_unique<TokenFileSource>(options, Geometry{2, 4}, 1));
  return sources;
}

void write_again(const Checkpoint& checkpoint) {
  const std::string run = fuzz::scratch() / "again";
  std::vector<float> values = checkpoint.tensors.read_floats("a");
  const std::string path = write_checkpoint(run, checkpoint.meta, {{"a", {values.data(), DType::f32, {2}}}});
  if (read_checkpoint(path).meta != checkpoint.meta) fuzz::fail("the state that was read differs", path);
  remove_tree(run);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string run = run_directory();
  static const std::vector<std::unique_ptr<TokenFileSource>> sources = data_sources();
  const std::string path = checkpoint_path(run, 7);
  std::filesystem::remove(path + "/state.json");
  fuzz::file("run/checkpoints/step-00000007/state.json", with_own_checksum(fuzz::text(data, size)));
  std::string position(fuzz::text(data, size));
  fuzz::accepted({ErrorCode::input}, [&] {
    Checkpoint checkpoint = read_checkpoint(path);
    if (checkpoint.tensors.read_floats("a").size() != 2) fuzz::fail("other tensors", checkpoint.path);
    position = checkpoint.meta.data_state;
    config_changes(checkpoint.meta.config, "[train]\nsteps = 9\n");
    if (checkpoint.meta.step >= 0) write_again(checkpoint);
  });
  fuzz::accepted({}, [&] { find_newest(run); });  // damaged checkpoints are passed over
  Batch batch;
  for (const auto& source : sources)
    if (fuzz::accepted({ErrorCode::input}, [&] { source->load_state(position); })) source->next(batch);
  return 0;
}
