#include "data/batch_text.h"

#include <algorithm>
#include <span>
#include <vector>

namespace quern {

namespace {

std::string number(std::int64_t value) { return std::to_string(value); }

class BatchWriter {
 public:
  BatchWriter(const Batch& batch, const Geometry& geometry, const TokenText* text)
      : batch_(batch), sequence_(geometry.sequence), text_(text), starts_(batch.documents) {
    if (starts_.empty())
      for (std::int64_t row = 0; row <= geometry.batch; ++row)
        starts_.push_back(static_cast<std::int32_t>(row * sequence_));
  }

  std::string write() {
    write_summary();
    for (std::size_t document = 0; document + 1 < starts_.size();) {
      const std::int64_t begin = starts_[document];
      if (begin % sequence_ == 0) out_ += "row " + number(begin / sequence_) + "\n";
      std::size_t next = document + 1;
      while (next + 1 < starts_.size() && stand_together(next - 1, next)) ++next;
      const bool together = next > document + 1;
      const std::int64_t end = starts_[next];
      out_ += "  tokens " + number(begin % sequence_) + " to " + number((end - 1) % sequence_) +
              (together ? ", each a document\n" : "\n");
      write_tokens(begin, end);
      document = next;
    }
    return out_;
  }

 private:
  void write_summary() {
    auto valid = std::count_if(batch_.targets.begin(), batch_.targets.end(), [](std::int32_t t) { return t >= 0; });
    const auto tokens = static_cast<std::int64_t>(batch_.tokens.size());
    out_ += number(tokens / sequence_) + " x " + number(sequence_) + " tokens, " +
            (batch_.documents.empty() ? std::string("documents joined")
                                      : number(static_cast<std::int64_t>(starts_.size()) - 1) + " documents") +
            ", " + number(valid) + " of " + number(tokens) + " targets count\n";
  }

  bool counts(std::int64_t token) const { return batch_.targets[static_cast<std::size_t>(token)] >= 0; }

  // Neighbours in a row that are one token each and predict nothing, as the filling between conversations is.
  bool stand_together(std::size_t a, std::size_t b) const {
    auto alone = [&](std::size_t document) {
      return starts_[document + 1] == starts_[document] + 1 && !counts(starts_[document]);
    };
    return alone(a) && alone(b) && starts_[b] % sequence_ != 0;
  }

  // Runs of tokens that are given or learned, and the target behind the row.
  void write_tokens(std::int64_t begin, std::int64_t end) {
    auto learned = [&](std::int64_t token) { return token > begin && counts(token - 1); };
    for (std::int64_t from = begin, to; from < end; from = to) {
      for (to = from + 1; to < end && learned(to) == learned(from);) ++to;
      out_ += learned(from) ? "    learned  " : "    given    ";
      out_ +=
          words(std::span(batch_.tokens).subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(to - from)));
      out_ += "\n";
    }
    if (counts(end - 1))
      out_ += "    learned  " + words(std::span(batch_.targets).subspan(static_cast<std::size_t>(end - 1), 1)) +
              ", after the row\n";
  }

  std::string words(std::span<const std::int32_t> tokens) const {
    if (text_) return quoted_text(text_->of(tokens));
    std::string list;
    for (std::int32_t token : tokens) list.append(list.empty() ? "" : " ").append(number(token));
    return list;
  }

  const Batch& batch_;
  const std::int64_t sequence_;
  const TokenText* text_;
  std::vector<std::int32_t> starts_;
  std::string out_;
};

}  // namespace

std::string batch_text(const Batch& batch, const Geometry& geometry, const TokenText* text) {
  return BatchWriter(batch, geometry, text).write();
}

}  // namespace quern
