#include "data/sources/saved_position.h"

#include <charconv>
#include <sstream>
#include <utility>

#include "quern/error.h"

namespace quern {

namespace {

const std::string kSameData = "give the run the data that the checkpoint was made with, or start a new run";
const std::string kRestore = "restore it, or start a new run";

std::vector<std::string> items(const std::string& list) {
  std::vector<std::string> found;
  std::istringstream in(list);
  for (std::string item; std::getline(in, item, ',');) found.push_back(item);
  return found;
}

}  // namespace

std::string position_name(OrderRule rule) { return "token-file-" + std::to_string(static_cast<int>(rule)); }

SavedPosition::SavedPosition(std::string where, const std::string& text) : where_(std::move(where)) {
  std::istringstream in(text);
  std::string word;
  bool good = static_cast<bool>(in >> word);
  if (word == position_name(OrderRule::first))
    rule_ = OrderRule::first;
  else
    good = good && word == position_name(rule_);
  while (good && in >> word) {
    std::size_t equals = word.find('=');
    good = equals != std::string::npos && fields_.emplace(word.substr(0, equals), word.substr(equals + 1)).second;
  }
  if (!good)
    throw Error(ErrorCode::input,
                {where_, "saved position in the data", "'" + text.substr(0, 80) + "'", position_name(OrderRule::second),
                 "the checkpoint is of another data source, or damaged"});
}

const std::string& SavedPosition::at(const std::string& key) const {
  static const std::string kAbsent;
  auto field = fields_.find(key);
  return field == fields_.end() ? kAbsent : field->second;
}

void SavedPosition::require_same(const SavedPosition& now, const std::vector<std::string>& paths, bool seeded) const {
  for (const std::string key : {"checksum", "tokens"}) {
    std::vector<std::string> was = items(at(key)), is = items(now.at(key));
    if (was.size() != is.size())
      throw Error(ErrorCode::input, {where_, "the data changed since the checkpoint: files", std::to_string(is.size()),
                                     std::to_string(was.size()), kSameData});
    for (std::size_t i = 0; i < is.size(); ++i)
      if (was[i] != is[i])
        throw Error(ErrorCode::input, {paths.at(i), "the data changed since the checkpoint: " + key, is[i],
                                       was[i].substr(0, 40), kSameData});
  }
  struct Setting {
    std::string key, what, some, none;  ///< `some` stands before a value, `none` in place of one that is not there
  };
  const Setting settings[] = {
      {"sequence", "the sequence length", "", "none"},
      {"order", "the order of the data", "", "none"},
      {"shares", "data.tokens.weights", "weights that give windows a pass of ", "no weights"},
      {"separator", "data.documents or the separator", "documents masked, ended by ", "documents joined"},
      {"seed", "the seed", "", "none"}};
  for (const Setting& setting : settings) {
    auto shown = [&](const std::string& value) {
      return value.empty() ? setting.none : setting.some + value.substr(0, 80);
    };
    if (at(setting.key) != now.at(setting.key) && (seeded || setting.key != "seed"))
      throw Error(ErrorCode::input, {where_, setting.what + " changed since the checkpoint", shown(now.at(setting.key)),
                                     shown(at(setting.key)), kRestore});
  }
}

std::uint64_t SavedPosition::number(const std::string& key, std::uint64_t below) const {
  const std::string& text = at(key);
  std::uint64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value >= below)
    throw Error(ErrorCode::input, {where_, "saved position in the data: " + key, "'" + text + "'",
                                   "a number below " + std::to_string(below), "the checkpoint is damaged"});
  return value;
}

}  // namespace quern
