#include "checkpoint/strict_json.h"

#include <algorithm>
#include <set>
#include <vector>

#include "checkpoint/names.h"
#include "data/mapped_file.h"
#include "quern/error.h"

namespace quern {

using nlohmann::json;

json parse_strict_json(const std::string& where, std::string_view text, int largest_depth) {
  auto refuse = [&](const std::string& what, const std::string& found, const std::string& expected) {
    throw Error(ErrorCode::input, {where, what, found, expected, "the file is damaged or was made by a faulty tool"});
  };
  // The parser takes a NUL for the end of its input and would not see what follows.
  if (std::size_t at = text.find('\0'); at != std::string_view::npos)
    refuse("not valid JSON", "a zero byte at offset " + std::to_string(at), "text");
  std::vector<std::set<std::string>> names;  // of the objects that are open, by depth
  auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
      if (depth >= largest_depth)
        refuse("JSON nested too deep", "more than " + std::to_string(largest_depth) + " levels", "");
      names.resize(static_cast<std::size_t>(depth) + 2);
      names.back().clear();
    } else if (event == json::parse_event_t::key) {
      const auto& name = parsed.get_ref<const std::string&>();
      if (!names[static_cast<std::size_t>(depth)].insert(name).second)
        refuse("a name stands twice in JSON", quote_name(name), "each name once");
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::exception& error) {
    std::string what = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    refuse("not valid JSON", printable(what.substr(std::min(what.size(), what.find(']') + 2)), 200), "");
  }
  return {};
}

json read_strict_json(const std::string& path, std::size_t largest_bytes, int largest_depth) {
  MappedFile file(path);
  if (file.bytes().size() > largest_bytes)
    throw Error(ErrorCode::input, {path, "file is too large", std::to_string(file.bytes().size()) + " bytes",
                                   "at most " + std::to_string(largest_bytes), ""});
  return parse_strict_json(path, {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()},
                           largest_depth);
}

}  // namespace quern
