#include "base/files/json_file.h"

#include "base/files/input_file.h"
#include "base/files/strict_json.h"
#include "quern/error.h"

namespace quern {

nlohmann::json read_strict_json(const std::string& path, std::size_t largest_bytes, int largest_depth) {
  const InputFile file(path);
  if (file.size() > largest_bytes)
    throw Error(ErrorCode::input, {path, "file is too large", std::to_string(file.size()) + " bytes",
                                   "at most " + std::to_string(largest_bytes), ""});
  return parse_strict_json(path, file.text(), largest_depth);
}

}  // namespace quern
