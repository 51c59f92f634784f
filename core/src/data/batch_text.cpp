#include "data/batch_text.h"

#include <algorithm>
#include <span>

namespace quern {

namespace {

std::string words(std::span<const std::int32_t> tokens, const TokenText* text) {
  if (text) return quoted_text(text->of(tokens));
  std::string list;
  for (std::int32_t token : tokens) list.append(list.empty() ? "" : " ").append(std::to_string(token));
  return list;
}

}  // namespace

std::string batch_text(const Batch& batch, const Geometry& geometry, const TokenText* text) {
  const std::vector<std::int32_t>& targets = batch.targets;
  std::vector<std::int32_t> starts = batch.documents;
  if (starts.empty())
    for (std::int64_t row = 0; row <= geometry.batch; ++row)
      starts.push_back(static_cast<std::int32_t>(row * geometry.sequence));
  auto number = [](std::int64_t value) { return std::to_string(value); };
  auto valid = std::count_if(targets.begin(), targets.end(), [](std::int32_t target) { return target >= 0; });
  std::string out = number(geometry.batch) + " x " + number(geometry.sequence) + " tokens, " +
                    (batch.documents.empty() ? std::string("documents joined")
                                             : number(static_cast<std::int64_t>(starts.size()) - 1) + " documents") +
                    ", " + number(valid) + " of " + number(geometry.tokens()) + " targets count\n";
  for (std::size_t document = 0; document + 1 < starts.size(); ++document) {
    const std::int64_t begin = starts[document], end = starts[document + 1], sequence = geometry.sequence;
    if (begin % sequence == 0) out += "row " + number(begin / sequence) + "\n";
    out += "  tokens " + number(begin % sequence) + " to " + number((end - 1) % sequence) + "\n";
    auto learned = [&](std::int64_t i) { return i > begin && targets[static_cast<std::size_t>(i - 1)] >= 0; };
    for (std::int64_t from = begin, to; from < end; from = to) {
      for (to = from + 1; to < end && learned(to) == learned(from);) ++to;
      out += learned(from) ? "    learned  " : "    given    ";
      out += words(std::span(batch.tokens).subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(to - from)),
                   text) +
             "\n";
    }
    if (std::int32_t behind = targets[static_cast<std::size_t>(end - 1)]; behind >= 0)
      out += "    learned  " + words(std::span(&behind, 1), text) + ", behind the row\n";
  }
  return out;
}

}  // namespace quern
