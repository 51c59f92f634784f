// fuzz_seeds DIRECTORY: a few small sound files for each target, in a folder of its name, from which fuzzing starts.
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>

#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors.h"
#include "data/sources/token_source.h"
#include "quern/error.h"

using namespace quern;
namespace fs = std::filesystem;

namespace {

fs::path root;

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void seed(const std::string& target, const std::string& name, const std::string& bytes) {
  fs::create_directories(root / target);
  std::ofstream(root / target / name, std::ios::binary) << bytes;
}

void safetensors_seeds() {
  const std::string path = root / "made.safetensors";
  auto make = [&](const std::string& name, const std::vector<TensorDeclaration>& tensors) {
    SafetensorsWriter writer(path, tensors, {{"format", "pt"}});
    for (const TensorDeclaration& tensor : tensors)
      writer.write(std::vector<std::byte>(*stored_bytes(tensor.type, tensor.extents)));
    writer.finish();
    seed("safetensors", name, read(path));
  };
  make("none", {});
  make("scalar", {{"s", StoredType::f32, {}}});
  make("empty", {{"a", StoredType::bf16, {2, 0}}, {"b", StoredType::f16, {3}}});
  std::vector<TensorDeclaration> all;
  for (int type = 0; type <= static_cast<int>(StoredType::boolean); ++type)
    all.push_back({"t" + std::to_string(type), static_cast<StoredType>(type), {1, 2}});
  make("types", all);
  fs::remove(path);
}

void index_seeds() {
  auto make = [](const std::string& name, const std::string& map) {
    seed("weight_index", name, "{\"metadata\":{\"total_size\":3},\"weight_map\":{" + map + "}}");
  };
  const std::string rest = R"(,"b":"one.safetensors","c":"two.safetensors")";
  make("whole", R"("a":"one.safetensors")" + rest);
  make("link", R"("secret":"link.safetensors","a":"one.safetensors")" + rest);
  make("parent", R"("secret":"../secret.safetensors")");
}

void token_seeds() {
  const std::string path = root / "made.tok";
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 50, .separator = 3};
  for (int i = 0; i < 21; ++i) content.tokens.push_back(i % 7);
  auto make = [&](const std::string& name) {
    write_token_file(path, content);
    seed("token_file", name, '\0' + read(path));
  };
  make("narrow");
  content.mask.assign(content.tokens.size(), true);
  make("masked");
  content.vocabulary = 100000;
  make("wide");
  fs::remove(path);
  for (std::int32_t version : {1, 2}) {
    std::int32_t fields[] = {version, 2, 21, 50, version - 1};
    std::string text("BIN.TOK\n");
    text.append(reinterpret_cast<const char*>(fields), sizeof fields).resize(1024);
    text.append(42, '\1').append(version == 2 ? 3 : 0, '\xff');
    seed("token_file", "llmq" + std::to_string(version), '\0' + text);
  }
  seed("token_file", "headerless", '\1' + std::string(42, '\2'));
}

void config_seeds() {
  for (const auto& entry : fs::recursive_directory_iterator(QUERN_SOURCE_DIR "/tests/goldens"))
    if (entry.path().filename() == "config.json")
      seed("model_config", entry.path().parent_path().filename(), read(entry.path()));
  for (const auto& entry : fs::recursive_directory_iterator(QUERN_SOURCE_DIR "/configs"))
    if (entry.path().extension() == ".toml") seed("run_config", entry.path().stem(), read(entry.path()));
  const std::string any = "[model]\nid = \"any\"\n[device]\nid = \"any\"\n[precision]\nid = \"any\"\n";
  seed("run_config", "resolves", any);
  seed("run_config", "options",
       any +
           "[model.any]\nthreads = 3\neps = 1e-3\nfactors = [1, 2.5]\ntable = { mode = \"exact\", names = [\"a\"] }\n" +
           "[log]\nsinks = [\"jsonl\"]\n[memory]\ndevice_budget = \"1GiB\"\nmoments = \"any\"\n");
  seed("run_config", "overrides",
       any + '\0' + "train.steps=7\nmodel.any.eps=0.5\nmodel.any.table.names=[]\nlog.directory=a b");
  seed("run_config", "override_bytes", any + '\0' + "log.directory=run\xff");
}

void log_seeds() {
  const std::string run = R"({"event":"run","name":"a","tokens_per_step":32,"device_bytes":1000})"
                          "\n";
  const std::string step = R"({"event":"step","step":1,"loss":0.5,"grad_norm":2.5,"tokens_per_second":7})"
                           "\n";
  const std::string rest = R"({"event":"eval","step":1,"loss":null,"loss_text":"nan"})"
                           "\n"
                           R"({"event":"end"})"
                           "\n";
  seed("run_log", "whole", run + step + rest);
  seed("run_log", "resumed", run + step + step + run + step);
  seed("run_log", "unfinished", run + step.substr(0, 30));
}

void checkpoint_seeds() {
  std::vector<float> values{1, 2};
  CheckpointMeta meta;
  meta.step = 7;
  meta.quern_version = "0.1.0";
  meta.config = "[train]\nsteps = 9\n";
  const std::string tokens = root / "train.tok";
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 50, .separator = 3};
  for (int i = 0; i < 41; ++i) content.tokens.push_back(i % 7);  // as the target makes them
  write_token_file(tokens, content);
  auto make = [&](const std::string& name, const TokenFileOptions& options) {
    meta.data_state = TokenFileSource(options, {2, 4}, 1).save_state();
    const std::string path = write_checkpoint(root / "run", meta, {{"a", {values.data(), DType::f32, {2}}}});
    seed("checkpoint", name, read(path + "/state.json"));
    seed("checkpoint", name + "_position", meta.data_state);
  };
  make("one", {.entries = {{tokens}}, .where = "data"});
  meta.config = "[train]\nsteps = 10\nfrom = \"a\"\n[model]\nid = \"llama\"\n[model.llama]\nsizes = [1, 2]\n";
  meta.device_state = "{\"choices\":[{\"key\":\"a\",\"value\":1}]}";
  meta.evaluated = false;
  make("two", {.entries = {{tokens}, {tokens}}, .weights = {1, 2}, .documents = true, .where = "data"});
  fs::remove(tokens);
  fs::remove_all(root / "run");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: fuzz_seeds DIRECTORY\n";
    return 2;
  }
  root = argv[1];
  try {
    fs::create_directories(root);
    safetensors_seeds();
    index_seeds();
    token_seeds();
    config_seeds();
    log_seeds();
    checkpoint_seeds();
  } catch (const std::exception& error) {
    std::cerr << "fuzz_seeds: " << error.what() << "\n";
    return 1;
  }
}
