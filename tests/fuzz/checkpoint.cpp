// A checkpoint's state.json beside a sound tensors file. Its own checksum is made to agree, so that what lies behind is
// reached too; then the position in the data that it holds is loaded.
#include <filesystem>

#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_store.h"
#include "data/checksum.h"
#include "data/token_source.h"
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

TokenFileSource data_source() {
  TokenFileContent content{.tokens = std::vector<std::int32_t>(41, 3), .mask = {}, .vocabulary = 50};
  write_token_file(fuzz::scratch() / "train.tok", content);
  return TokenFileSource({.entries = {{fuzz::scratch() / "train.tok"}}, .where = "data"}, {2, 4}, 1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string run = run_directory();
  static TokenFileSource source = data_source();
  const std::string path = checkpoint_path(run, 7);
  std::filesystem::remove(path + "/state.json");
  fuzz::file("run/checkpoints/step-00000007/state.json", with_own_checksum(fuzz::text(data, size)));
  std::string position(fuzz::text(data, size));
  fuzz::accepted({ErrorCode::input}, [&] {
    Checkpoint checkpoint = read_checkpoint(path);
    if (checkpoint.tensors.read_floats("a").size() != 2) fuzz::fail("other tensors", checkpoint.path);
    position = checkpoint.meta.data_state;
  });
  fuzz::accepted({}, [&] { find_newest(run); });  // what is damaged is passed over
  Batch batch;
  if (fuzz::accepted({ErrorCode::input}, [&] { source.load_state(position); })) source.next(batch);
  return 0;
}
