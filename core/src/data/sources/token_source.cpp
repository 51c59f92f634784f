#include "data/sources/token_source.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>

#include "base/checksum.h"
#include "data/sources/saved_position.h"
#include "quern/error.h"

namespace quern {

namespace {

template <class Range, class Text>
std::string joined(const Range& range, Text text) {
  std::string list;
  for (const auto& item : range) list.append(list.empty() ? "" : ",").append(text(item));
  return list;
}

}  // namespace

TokenFileSource::TokenFileSource(const TokenFileOptions& options, Geometry geometry, std::uint64_t seed)
    : geometry_(geometry),
      seed_(seed),
      shuffle_(options.shuffle),
      documents_(options.documents),
      where_(options.where),
      groups_(open(options, geometry.sequence)),
      weights_(options.weights),
      order_(make_order(OrderRule::second)) {
  if (geometry.batch < 1) fail_internal("TokenFileSource", "batch out of range");
  check_files();
  if (options.reading.vocabulary > 0 && vocabulary_ > options.reading.vocabulary) take_used_vocabulary();
  check_targets();
  description_ = describe(order_);
  window_.resize(static_cast<std::size_t>(geometry.sequence) + 1);
  counts_.resize(window_.size());
  if (options.verify) check_ = std::make_unique<PayloadCheck>(files());
}

// ---- files ----

std::vector<TokenFileSource::Group> TokenFileSource::open(const TokenFileOptions& options, std::int64_t sequence) {
  if (sequence < 1) fail_internal("TokenFileSource", "sequence out of range");
  std::vector<Group> groups;
  auto open_files = std::make_shared<OpenFiles>();
  for (const std::vector<std::string>& entry : options.entries) {
    if (groups.empty() || !options.weights.empty()) groups.emplace_back();
    Group& group = groups.back();
    for (const std::string& path : entry) {
      TokenFile file(path, options.reading, open_files);
      auto windows = static_cast<std::uint64_t>((file.count() - 1) / sequence);
      if (windows == 0)
        throw Error(ErrorCode::input,
                    {path, "shorter than one sequence", std::to_string(file.count()) + " tokens",
                     "at least " + std::to_string(sequence + 1), "use a shorter sequence or more data"});
      std::uint64_t begin = group.empty() ? 0 : group.back().end;
      group.push_back({std::move(file), begin, begin + windows});
    }
  }
  if (groups.empty() || groups.front().empty()) fail_internal("TokenFileSource", "no files");
  if (!options.weights.empty() && options.weights.size() != groups.size())
    fail_internal("TokenFileSource", "one weight an entry");
  return groups;
}

std::vector<const TokenFile*> TokenFileSource::files() const {
  std::vector<const TokenFile*> files;
  for (const Group& group : groups_)
    for (const Part& part : group) files.push_back(&part.file);
  return files;
}

WindowOrder TokenFileSource::make_order(OrderRule rule) const {
  std::vector<std::uint64_t> windows;
  for (const Group& group : groups_) windows.push_back(group.back().end);
  return WindowOrder(std::move(windows), weights_, shuffle_, seed_, "data.tokens.weights", rule);
}

void TokenFileSource::check_files() {
  const TokenFile* stated = nullptr;
  for (const Group& group : groups_)
    for (const auto& [file, begin, end] : group) {
      if (documents_ && !file.separator())
        throw Error(ErrorCode::input, {file.path(), "documents cannot be separated", "no separator token in the file",
                                       "one, since data.documents is \"masked\"",
                                       "set data.tokens.separator, or data.documents = \"joined\""});
      vocabulary_ = std::max(vocabulary_, file.vocabulary());
      if (!file.states_vocabulary()) continue;
      if (stated && file.vocabulary() != stated->vocabulary())
        throw Error(ErrorCode::input,
                    {file.path(), "another vocabulary than in " + stated->path(), std::to_string(file.vocabulary()),
                     std::to_string(stated->vocabulary()), "prepare all files with one tokenizer"});
      stated = &file;
    }
}

// A tokenizer may have tokens behind the model's rows, such as padding. What counts is whether the data have them.
void TokenFileSource::take_used_vocabulary() {
  constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  std::int32_t largest = 0;
  std::vector<std::int32_t> tokens;
  for (const TokenFile* file : files())
    for (std::int64_t first = 0; first < file->count(); first += kPiece) {
      tokens.resize(static_cast<std::size_t>(std::min(kPiece, file->count() - first)));
      file->read(first, tokens);
      largest = std::max(largest, *std::max_element(tokens.begin(), tokens.end()));
    }
  vocabulary_ = largest + 1;
  for (Group& group : groups_)
    for (Part& part : group) part.file.bound_tokens(vocabulary_);
}

void TokenFileSource::check_targets() const {
  for (const Group& group : groups_)
    for (const auto& [file, begin, end] : group) {
      auto target = file.first_target(documents_);
      if (target && *target <= static_cast<std::int64_t>(end - begin) * geometry_.sequence) return;
    }
  const std::string& first = groups_.front().front().file.path();
  bool one = groups_.size() == 1 && groups_.front().size() == 1;
  throw Error(ErrorCode::input, {one ? first : where_ + ": " + first + " and the others",
                                 "no token of any whole sequence counts in the loss", "all masked",
                                 "at least one target", "check the loss mask of the data preparation"});
}

// ---- batches ----

void TokenFileSource::next(Batch& batch) {
  if (check_) check_->rethrow();
  auto tokens = static_cast<std::size_t>(geometry_.tokens());
  batch.tokens.resize(tokens);
  batch.targets.resize(tokens);
  batch.positions.resize(tokens);
  batch.documents.clear();
  batch.names.clear();
  for (std::int64_t row = 0; row < geometry_.batch; ++row)
    read_window(place_ + static_cast<std::uint64_t>(row), row, batch);
  if (documents_) batch.documents.push_back(static_cast<std::int32_t>(tokens));
  place_ += static_cast<std::uint64_t>(geometry_.batch);
}

void TokenFileSource::read_window(std::uint64_t place, std::int64_t row, Batch& batch) {
  const WindowOrder::Window window = order_.at(place);
  const Group& group = groups_[window.group];
  auto part = std::upper_bound(group.begin(), group.end(), window.index,
                               [](std::uint64_t index, const Part& part) { return index < part.end; });
  const TokenFile& file = part->file;
  std::int64_t first = static_cast<std::int64_t>(window.index - part->begin) * geometry_.sequence;
  batch.names.push_back(file.path() + " window " + std::to_string(window.index - part->begin));
  file.read(first, window_);
  file.read_targets(first, counts_);
  auto at = static_cast<std::size_t>(row * geometry_.sequence);
  std::size_t document = 0;
  for (std::size_t i = 0; i + 1 < window_.size(); ++i) {
    const bool ends = documents_ && window_[i] == *file.separator();
    const bool counts = !ends && counts_[i + 1] != 0;
    if (documents_ && i == document) batch.documents.push_back(static_cast<std::int32_t>(at + i));
    batch.tokens[at + i] = window_[i];
    batch.targets[at + i] = counts ? window_[i + 1] : -1;
    batch.positions[at + i] = static_cast<std::int32_t>(i - document);
    if (ends) document = i + 1;
  }
}

void TokenFileSource::skip(std::int64_t batches) {
  const auto step = static_cast<std::uint64_t>(geometry_.batch);
  const std::uint64_t most = order_.windows() * std::uint64_t{std::numeric_limits<std::uint32_t>::max()};
  if (batches < 0 || static_cast<std::uint64_t>(batches) >= (most - place_) / step)
    throw Error(ErrorCode::config, {where_, "number of a batch", std::to_string(batches),
                                    "below " + std::to_string((most - place_) / step), ""});
  place_ += static_cast<std::uint64_t>(batches) * step;
}

// ---- positions ----

std::string TokenFileSource::describe(const WindowOrder& order) const {
  std::ostringstream out;
  out << position_name(order.rule())
      << " checksum=" << joined(files(), [](const TokenFile* file) { return checksum_text(file->checksum()); })
      << " tokens=" << joined(files(), [](const TokenFile* file) { return std::to_string(file->count()); })
      << " sequence=" << geometry_.sequence << " order=" << (shuffle_ ? "shuffled" : "sequential") << " seed=" << seed_;
  auto share_text = [&](double share) {  // the first rule's are whole numbers
    return order.rule() == OrderRule::first ? std::to_string(static_cast<std::uint64_t>(share)) : std::to_string(share);
  };
  if (!order.shares().empty()) out << " shares=" << joined(order.shares(), share_text);
  if (documents_)
    out << " separator=" << joined(files(), [](const TokenFile* file) { return std::to_string(*file->separator()); });
  return out.str();
}

std::string TokenFileSource::save_state() const {
  auto windows = order_.windows();
  return description_ + " epoch=" + std::to_string(place_ / windows) + " window=" + std::to_string(place_ % windows);
}

void TokenFileSource::load_state(const std::string& state) {
  std::vector<std::string> paths;
  for (const TokenFile* file : files()) paths.push_back(file->path());
  const SavedPosition saved(where_, state);
  WindowOrder order = make_order(saved.rule());
  std::string description = describe(order);
  saved.require_same(SavedPosition(where_, description), paths, shuffle_);
  const std::uint64_t windows = order_.windows();
  const std::uint64_t window = saved.number("window", windows);
  const std::uint64_t epoch = saved.number("epoch", std::numeric_limits<std::uint32_t>::max());
  if (epoch > (std::numeric_limits<std::uint64_t>::max() - window) / windows)
    fail_internal(where_, "position out of range");
  place_ = epoch * windows + window;
  order_ = std::move(order);
  description_ = std::move(description);
}

}  // namespace quern
