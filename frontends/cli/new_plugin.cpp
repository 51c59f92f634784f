#include "new_plugin.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>

#include "quern/error.h"

namespace quern::cli {

namespace fs = std::filesystem;

namespace {

/// The words behind add_quern_plugin( in a CMakeLists.txt: the id, KIND, the kind.
Example example_of(const fs::path& folder) {
  std::ifstream file(folder / "CMakeLists.txt");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::string call = "add_quern_plugin(";
  const std::size_t begin = text.find(call);
  if (begin == std::string::npos) return {};
  const std::string words = text.substr(begin + call.size(), text.find(')', begin) - begin - call.size());
  const std::string mark = " KIND ";
  const std::size_t kind = words.find(mark);
  if (kind == std::string::npos) return {};
  const std::string rest = words.substr(kind + mark.size());
  return {rest.substr(0, rest.find(' ')), words.substr(0, kind), folder};
}

std::string camel_case(const std::string& name) {
  std::string out;
  bool begins = true;
  for (char c : name) {
    if (c != '_') out += begins ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    begins = c == '_';
  }
  return out;
}

void check_name(const std::string& name) {
  const bool good = !name.empty() && std::islower(static_cast<unsigned char>(name[0])) &&
                    std::all_of(name.begin(), name.end(),
                                [](unsigned char c) { return std::islower(c) || std::isdigit(c) || c == '_'; });
  if (!good)
    throw Error(ErrorCode::config, {.where = "quern plugins new",
                                    .what = "not a name of a plugin",
                                    .found = name,
                                    .expected = "a small letter, then small letters, digits and _"});
}

}  // namespace

std::vector<Example> examples_in(const fs::path& folder) {
  std::vector<Example> examples;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing))
    if (Example example = example_of(entry.path()); !example.id.empty()) examples.push_back(std::move(example));
  if (examples.empty())
    throw Error(ErrorCode::resources, {.where = "quern plugins new",
                                       .what = "there are no examples to begin with",
                                       .expected = folder.string() + ", which `cmake --install` makes",
                                       .next = "run the installed quern"});
  std::sort(examples.begin(), examples.end(), [](const Example& a, const Example& b) { return a.id < b.id; });
  return examples;
}

std::string renamed(std::string text, const std::string& from, const std::string& to) {
  for (const auto& [old, fresh] : {std::pair{from, to}, {camel_case(from), camel_case(to)}})
    for (std::size_t at = text.find(old); at != std::string::npos; at = text.find(old, at + fresh.size()))
      text.replace(at, old.size(), fresh);
  return text;
}

void copy_example(const Example& example, const std::string& name, const fs::path& into) {
  check_name(name);
  const fs::path made = into / name;
  std::error_code failed;
  if (!fs::create_directory(made, failed))
    throw Error(ErrorCode::config, {.where = made.string(),
                                    .what = failed ? failed.message() : "is there already",
                                    .next = "choose another name or folder"});
  for (const auto& entry : fs::directory_iterator(example.folder)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream from(entry.path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(from), {}};
    const fs::path to = made / renamed(entry.path().filename().string(), example.id, name);
    std::ofstream file(to, std::ios::binary);
    file << renamed(text, example.id, name) << std::flush;
    if (!file) throw Error(ErrorCode::resources, {.where = to.string(), .what = "cannot be written"});
  }
}

}  // namespace quern::cli
