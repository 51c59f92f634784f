// The export half of hf_weights.h: one safetensors file with its config and tokenizer, put in place as a whole.

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>

#include <nlohmann/json.hpp>

#include "base/files/durable_file.h"
#include "base/files/input_file.h"
#include "base/shorten.h"
#include "hf/hf_weights.h"
#include "quern/error.h"
#include "quern/numeric.h"

namespace quern {

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kPiece = std::int64_t{1} << 20;  // elements
constexpr const char* kWeights = "model.safetensors";
constexpr const char* kConfig = "config.json";
constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr const char* kGeneration = "generation_config.json";
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
constexpr const char* kChatTemplate = "chat_template.jinja";
constexpr const char* kMoreTemplates = "additional_chat_templates";
constexpr const char* kDefaultTemplate = "default";
constexpr std::array<const char*, 8> kTokenizerFiles{"tokenizer.json",    kTokenizerConfig, "special_tokens_map.json",
                                                     "added_tokens.json", "vocab.json",     "merges.txt",
                                                     "tokenizer.model",   kChatTemplate};

bool is_template(const fs::directory_entry& entry) {
  std::error_code error;
  return entry.path().extension() == ".jinja" && entry.is_regular_file(error);
}

bool is_export_file(const std::string& name, const std::string& weights) {
  return name == weights || name == kConfig || name == kGeneration || name == kAdapterConfig ||
         std::find(kTokenizerFiles.begin(), kTokenizerFiles.end(), name) != kTokenizerFiles.end();
}

// Of a model file that an export wrote; transformers insists on the format.
const std::map<std::string, std::string> kMetadata{{"format", "pt"}, {"written_by", "quern"}};

std::map<std::string, std::string> metadata_of(const std::string& path) {
  try {
    return SafetensorsFile(path).metadata();
  } catch (const Error&) {  // no such file
    return {};
  }
}

}  // namespace

void check_replaceable(const std::string& directory, const std::string& weights) {
  std::error_code error;
  fs::file_status status = fs::symlink_status(directory, error);
  if (!fs::exists(status)) return;
  auto refuse = [&](const std::string& found) {
    throw Error(ErrorCode::resources, {directory, "is there already and is not an export", found,
                                       "a new name, or an older export", "move it away, or choose another directory"});
  };
  if (!fs::is_directory(status)) refuse("a file or link");
  fs::directory_iterator entries(directory, error);
  if (error) fail_resources(directory, "cannot be read", error.value());
  for (const fs::directory_entry& entry : entries) {
    std::string name = entry.path().filename();
    if (name == kMoreTemplates && entry.is_directory(error)) {
      for (const fs::directory_entry& file : fs::directory_iterator(entry, error))
        if (!is_template(file)) refuse(quote_name(name + "/" + file.path().filename().string()));
      continue;
    }
    if (!is_export_file(name, weights) || !entry.is_regular_file(error)) refuse(quote_name(name));
  }
  if (fs::is_empty(directory, error)) return;
  const std::string path = directory + "/" + weights;
  if (!fs::exists(path, error)) refuse("no " + weights);
  if (metadata_of(path) != kMetadata) refuse(weights + " of another program");
}

namespace {

/// One stored tensor of the export.
struct Piece {
  const ParameterSpec* parameter;
  const ParameterPart* part;
  std::int64_t layer, first, count;
};

}  // namespace

void write_hf_weights(const std::string& path, DType dtype, std::span<const ParameterSpec> parameters,
                      std::int64_t layers, const WeightReader& reader) {
  if (dtype != DType::f32 && dtype != DType::bf16) fail_internal(path, "exports are f32 or bf16");
  std::vector<TensorDeclaration> tensors;
  std::vector<Piece> pieces;
  for (ParameterGroup group : {ParameterGroup::embedding, ParameterGroup::block, ParameterGroup::head})
    for (std::int64_t layer = 0; layer < (group == ParameterGroup::block ? layers : 1); ++layer)
      for (const ParameterSpec& parameter : parameters) {
        if (parameter.group != group) continue;
        std::int64_t first = 0;
        for (const ParameterPart& part : parameter.parts) {
          std::int64_t count = part.rows * parameter.columns();
          tensors.push_back({hf_tensor_name(part, layer), stored_type_of(dtype), hf_tensor_extents(parameter, part)});
          pieces.push_back({&parameter, &part, group == ParameterGroup::block ? layer : -1, first, count});
          first += count;
        }
      }
  SafetensorsWriter writer(path, tensors, kMetadata);
  std::vector<std::uint16_t> rounded(kPiece);
  auto write = [&](std::span<const float> some, const std::string& name) {
    if (!std::all_of(some.begin(), some.end(), [](float value) { return std::isfinite(value); }))
      throw Error(ErrorCode::numerics, {path, "tensor " + quote_name(name) + " holds a NaN or infinity", "",
                                        "finite weights", "export an earlier checkpoint"});
    if (dtype == DType::f32) return writer.write(std::as_bytes(some));
    std::transform(some.begin(), some.end(), rounded.begin(), float_to_bf16);
    writer.write(std::as_bytes(std::span(rounded.data(), some.size())));
  };
  std::vector<float> values;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const bool whole = !piece.part->as_stored();  // another form than the tensor's is turned as a whole
    const std::int64_t most = whole ? piece.count : kPiece;
    for (std::int64_t done = 0; done < piece.count; done += most) {
      values.resize(static_cast<std::size_t>(std::min(most, piece.count - done)));
      reader(*piece.parameter, piece.layer, piece.first + done, values);
      if (whole) values = hf_tensor_values(*piece.part, piece.parameter->columns(), values);
      const std::span<const float> all = values;
      for (std::size_t at = 0; at < all.size(); at += kPiece)
        write(all.subspan(at, std::min<std::size_t>(kPiece, all.size() - at)), tensors[i].name);
    }
  }
  writer.finish();
}

namespace {

void write_text(const std::string& path, const std::string& text) {
  DurableFile file(path);
  file.write(text);
  file.commit();
}

std::vector<InputFile> tokenizer_files(const std::string& directory) {
  std::vector<InputFile> files;
  for (const char* name : kTokenizerFiles) {
    const fs::path path = fs::path(directory) / name;
    std::error_code error;  // a link that leads nowhere is refused, not left out
    if (fs::exists(fs::symlink_status(path, error))) files.emplace_back(path);
  }
  if (files.empty())
    throw Error(ErrorCode::input, {directory, "no tokenizer files", "", "tokenizer.json or the like",
                                   "give the directory of the model's tokenizer"});
  return files;
}

// Libraries before chat_template.jinja read the key of tokenizer_config.json.
std::string with_templates(const InputFile& tokenizer_config, const std::map<std::string, std::string>& templates) {
  auto config = nlohmann::ordered_json::parse(tokenizer_config.text(), nullptr, false);
  if (!config.is_object() || !config.contains("chat_template")) return tokenizer_config.text();
  nlohmann::ordered_json named = nlohmann::ordered_json::array();
  for (const auto& [name, text] : templates) named.push_back({{"name", name}, {"template", text}});
  config["chat_template"] = named.size() == 1 ? named[0]["template"] : named;
  return config.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

void copy(const InputFile& content, const std::string& to) {
  DurableFile file(to);
  content.for_each_piece(0, [&](std::span<const std::byte> piece) {
    file.write(piece);
    return true;
  });
  file.commit();
}

void copy_tokenizer(const HfExport& what, const std::string& to) {
  const std::string more = to + "/" + kMoreTemplates;
  for (const InputFile& content : tokenizer_files(what.tokenizer_from)) {
    const std::string name = fs::path(content.path()).filename().string();
    if (!what.chat_templates.empty() && name == kTokenizerConfig)
      write_text(to + "/" + name, with_templates(content, what.chat_templates));
    else if (what.chat_templates.empty() || name != kChatTemplate)
      copy(content, to + "/" + name);
  }
  std::error_code error;  // a tokenizer without such a folder has one template
  if (what.chat_templates.empty())
    for (const fs::directory_entry& file :
         fs::directory_iterator(fs::path(what.tokenizer_from) / kMoreTemplates, error))
      if (is_template(file)) {
        make_directories(more);
        copy(InputFile(file.path()), more + "/" + file.path().filename().string());
      }
  for (const auto& [name, text] : what.chat_templates) {
    if (name != kDefaultTemplate) make_directories(more);
    write_text(name == kDefaultTemplate ? to + "/" + kChatTemplate : more + "/" + name + ".jinja", text);
  }
}

}  // namespace

void check_export(const std::string& directory, const HfExport& what) {
  check_replaceable(directory, kWeights);
  if (!what.tokenizer_from.empty()) tokenizer_files(what.tokenizer_from);
}

void export_hf_model(const std::string& directory, const HfExport& what, std::span<const ParameterSpec> parameters,
                     std::int64_t layers, const WeightReader& reader) {
  fs::path target = fs::path(directory).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();  // "out/" names out
  check_replaceable(target, kWeights);
  if (target.has_parent_path()) make_directories(target.parent_path());
  write_directory(target, [&](const std::string& temporary) {
    write_hf_weights(temporary + "/" + kWeights, what.dtype, parameters, layers, reader);
    write_text(temporary + "/" + kConfig, what.config);
    if (!what.generation_config.empty()) write_text(temporary + "/" + kGeneration, what.generation_config);
    if (!what.tokenizer_from.empty()) copy_tokenizer(what, temporary);
  });
}

}  // namespace quern
