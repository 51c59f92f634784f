#include "data/token_source.h"

#include <charconv>
#include <limits>
#include <map>
#include <sstream>
#include <utility>

#include "data/checksum.h"
#include "data/permutation.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr const char* kStateName = "token-file-1";

// "token-file-1 key=value key=value ..."; an input error when it is not of that form.
std::map<std::string, std::string> parse_state(const std::string& path, const std::string& state) {
  std::istringstream in(state);
  std::string word;
  std::map<std::string, std::string> fields;
  bool good = in >> word && word == kStateName;
  while (good && in >> word) {
    std::size_t equals = word.find('=');
    good = equals != std::string::npos && fields.emplace(word.substr(0, equals), word.substr(equals + 1)).second;
  }
  if (!good)
    throw Error(ErrorCode::input, {path, "saved position in the data", "'" + state.substr(0, 80) + "'", kStateName,
                                   "the checkpoint is of another data source, or damaged"});
  return fields;
}

std::uint64_t number_of(const std::string& path, const std::map<std::string, std::string>& fields,
                        const std::string& key, std::uint64_t below) {
  auto field = fields.find(key);
  std::string text = field == fields.end() ? "" : field->second;
  std::uint64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value >= below)
    throw Error(ErrorCode::input, {path, "saved position in the data: " + key, "'" + text + "'",
                                   "a number below " + std::to_string(below), "the checkpoint is damaged"});
  return value;
}

}  // namespace

TokenFileSource::TokenFileSource(const TokenFileOptions& options, Geometry geometry, std::uint64_t seed, int rank,
                                 int size)
    : file_(options.path),
      geometry_(geometry),
      seed_(seed),
      rank_(static_cast<std::uint64_t>(rank)),
      size_(static_cast<std::uint64_t>(size)),
      shuffle_(options.shuffle) {
  if (geometry.batch < 1 || geometry.sequence < 1 || rank < 0 || rank >= size)
    fail_internal("TokenFileSource", "geometry or rank out of range");
  windows_ = (file_.count() - 1) / geometry.sequence;
  if (windows_ == 0)
    throw Error(ErrorCode::input,
                {file_.path(), "shorter than one sequence", std::to_string(file_.count()) + " tokens",
                 "at least " + std::to_string(geometry.sequence + 1), "use a shorter sequence or more data"});
  auto target = file_.first_target();
  if (!target || *target > windows_ * geometry.sequence)
    throw Error(ErrorCode::input, {file_.path(), "no token of any whole sequence counts in the loss", "all masked",
                                   "at least one target", "check the loss mask of the data preparation"});
  window_.resize(static_cast<std::size_t>(geometry.sequence) + 1);
}

void TokenFileSource::next(Batch& batch) {
  auto tokens = static_cast<std::size_t>(geometry_.tokens());
  batch.tokens.resize(tokens);
  batch.targets.resize(tokens);
  batch.positions.resize(tokens);
  batch.documents.clear();
  for (std::int64_t row = 0; row < geometry_.batch; ++row)
    read_window(place_ + static_cast<std::uint64_t>(row) * size_ + rank_, row, batch);
  place_ += static_cast<std::uint64_t>(geometry_.batch) * size_;
}

void TokenFileSource::read_window(std::uint64_t place, std::int64_t row, Batch& batch) {
  auto windows = static_cast<std::uint64_t>(windows_);
  std::uint64_t window = place % windows;
  if (shuffle_) window = permuted(window, windows, seed_, static_cast<std::uint32_t>(place / windows));
  std::int64_t first = static_cast<std::int64_t>(window) * geometry_.sequence;
  file_.read(first, window_);
  auto at = static_cast<std::size_t>(row * geometry_.sequence);
  for (std::size_t i = 0; i + 1 < window_.size(); ++i) {
    batch.tokens[at + i] = window_[i];
    batch.targets[at + i] = file_.is_target(first + static_cast<std::int64_t>(i) + 1) ? window_[i + 1] : -1;
    batch.positions[at + i] = static_cast<std::int32_t>(i);
  }
}

std::string TokenFileSource::save_state() const {
  auto windows = static_cast<std::uint64_t>(windows_);
  std::ostringstream out;
  out << kStateName << " checksum=" << checksum_text(file_.checksum()) << " tokens=" << file_.count()
      << " sequence=" << geometry_.sequence << " order=" << (shuffle_ ? "shuffled" : "sequential") << " seed=" << seed_
      << " epoch=" << place_ / windows << " window=" << place_ % windows;
  return out.str();
}

void TokenFileSource::load_state(const std::string& state) {
  auto fields = parse_state(file_.path(), state);
  auto same = [&](const std::string& key, const std::string& now, const std::string& what, const std::string& next) {
    auto saved = fields.find(key);
    if (saved == fields.end() || saved->second != now)
      throw Error(ErrorCode::input, {file_.path(), what, now,
                                     saved == fields.end() ? "a value in the saved position" : saved->second, next});
  };
  const std::string kData = "give the run the data that the checkpoint was made with, or start a new run";
  same("checksum", checksum_text(file_.checksum()), "the data changed since the checkpoint: checksum", kData);
  same("tokens", std::to_string(file_.count()), "the data changed since the checkpoint: tokens", kData);
  same("sequence", std::to_string(geometry_.sequence), "the sequence length changed since the checkpoint",
       "restore it, or start a new run");
  same("order", shuffle_ ? "shuffled" : "sequential", "the order of the data changed since the checkpoint",
       "restore it, or start a new run");
  if (shuffle_)
    same("seed", std::to_string(seed_), "the seed changed since the checkpoint", "restore it, or start a new run");
  auto windows = static_cast<std::uint64_t>(windows_);
  std::uint64_t window = number_of(file_.path(), fields, "window", windows);
  std::uint64_t epoch = number_of(file_.path(), fields, "epoch", std::numeric_limits<std::uint32_t>::max());
  if (epoch > (std::numeric_limits<std::uint64_t>::max() - window) / windows)
    fail_internal(file_.path(), "position out of range");
  place_ = epoch * windows + window;
}

}  // namespace quern
