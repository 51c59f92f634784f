#include "base/files/strict_json.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/shorten.h"
#include "quern/error.h"

namespace quern {

using nlohmann::json;

namespace {

/// Builds the value from the parser's events. (The library's own callbacks visit an object's members again after each
/// of them, which takes the square of their number.)
class Builder final : public nlohmann::json_sax<json> {
 public:
  Builder(const std::string& where, int largest_depth)
      : where_(where), largest_depth_(static_cast<std::size_t>(largest_depth)) {}

  json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& value) override { return add(std::move(value)); }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    auto [member, fresh] = open_.back()->get_ref<json::object_t&>().try_emplace(std::move(name));
    if (!fresh) refuse("a name stands twice in JSON", quote_name(member->first), "each name once");
    member_ = &member->second;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const json::exception& error) override {
    const std::string what = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    refuse("not valid JSON", printable(what.substr(std::min(what.size(), what.find(']') + 2)), 200), "");
  }

  [[noreturn]] void refuse(const std::string& what, const std::string& found, const std::string& expected) const {
    throw Error(ErrorCode::input, {where_, what, found, expected, "the file is damaged or was made by a faulty tool"});
  }

 private:
  bool add(json value) {
    place(std::move(value));
    return true;
  }
  bool open(json value) {
    if (open_.size() >= largest_depth_)
      refuse("JSON nested too deep", "more than " + std::to_string(largest_depth_) + " levels", "");
    open_.push_back(&place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  json& place(json value) {
    if (open_.empty()) return root_ = std::move(value);
    if (open_.back()->is_object()) return *member_ = std::move(value);
    auto& list = open_.back()->get_ref<json::array_t&>();
    list.push_back(std::move(value));
    return list.back();
  }

  const std::string& where_;
  std::size_t largest_depth_;
  json root_;
  std::vector<json*> open_;  ///< objects and arrays, the innermost last; only the last grows, so the pointers hold
  json* member_ = nullptr;   ///< of the innermost object: where its next value goes
};

}  // namespace

json parse_strict_json(const std::string& where, std::string_view text, int largest_depth) {
  if (text.starts_with("version https://git-lfs.github.com/spec/"))  // no JSON begins so
    throw Error(ErrorCode::input, {where, "a git-lfs pointer, not the file itself", "", "",
                                   "fetch the file with `git lfs pull`, or download it again"});
  Builder builder(where, largest_depth);
  // The parser takes a NUL for the end of its input and would not see what follows.
  if (std::size_t at = text.find('\0'); at != std::string_view::npos)
    builder.refuse("not valid JSON", "a zero byte at offset " + std::to_string(at), "text");
  json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

}  // namespace quern
