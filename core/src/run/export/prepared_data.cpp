#include "run/export/prepared_data.h"

#include <algorithm>
#include <filesystem>

#include "base/files/input_file.h"
#include "base/files/json_file.h"
#include "data/file_list.h"
#include "quern/error.h"

namespace quern {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kDepth = 32;
constexpr std::size_t kLargestMeta = std::size_t{64} << 20;  // it lists the sources
constexpr std::uint64_t kLargestTemplate = std::uint64_t{4} << 20;

/// Null for a file that is missing, or of another program.
json end_tokens_in(const fs::path& folder) {
  try {
    const json meta = read_strict_json(folder / "meta.json", kLargestMeta, kDepth);
    return meta.is_object() && meta.contains("end_tokens") ? meta.at("end_tokens") : json();
  } catch (const Error&) {
    return nullptr;
  }
}

/// By name; of a file that is too large, none.
std::map<std::string, std::string> chat_templates_in(const fs::path& folder) {
  std::map<std::string, std::string> templates;
  std::error_code ignored;
  auto take = [&](const std::string& name, const fs::path& path) {
    if (!fs::is_regular_file(path, ignored)) return;
    const InputFile file(path);
    if (file.size() <= kLargestTemplate) templates[name] = file.text();
  };
  for (const fs::directory_entry& file : fs::directory_iterator(folder / "additional_chat_templates", ignored))
    if (file.path().extension() == ".jinja") take(file.path().stem(), file.path());
  take("default", folder / "chat_template.jinja");
  return templates;
}

void take(PreparedData& prepared, std::string& taken_from, const fs::path& folder) {
  const json tokens = end_tokens_in(folder);
  if (!tokens.is_array()) return;
  for (const json& token : tokens) {
    if (!token.is_number_unsigned() || token > std::uint64_t{INT32_MAX}) continue;
    const auto id = token.get<std::int32_t>();
    if (std::find(prepared.end_tokens.begin(), prepared.end_tokens.end(), id) == prepared.end_tokens.end())
      prepared.end_tokens.push_back(id);
  }
  std::map<std::string, std::string> templates = chat_templates_in(folder);
  if (templates.empty()) return;
  if (prepared.chat_templates.empty()) {
    prepared.chat_templates = std::move(templates);
    taken_from = folder;
  } else if (templates != prepared.chat_templates) {
    prepared.notes.push_back("data have several chat templates: the export gets the one in " + taken_from +
                             ", not the one in " + folder.string());
  }
}

}  // namespace

PreparedData prepared_data(const Session& session) {
  PreparedData prepared;
  if (session.config.id("data") != "tokens") return prepared;
  const OptionValues data = session.config.factory_values("data");
  std::vector<fs::path> folders;
  for (const std::string& entry : data.get<std::vector<std::string>>("train"))
    for (const std::string& file : files_of(entry, "data.tokens.train"))
      if (fs::path folder = fs::path(file).parent_path();
          std::find(folders.begin(), folders.end(), folder) == folders.end())
        folders.push_back(std::move(folder));
  std::string taken_from;
  for (const fs::path& folder : folders) take(prepared, taken_from, folder);
  return prepared;
}

}  // namespace quern
