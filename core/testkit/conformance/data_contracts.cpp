// Of datasets: batches that fit together, and sources that repeat and go on at a saved position.
#include <algorithm>
#include <set>

#include "conformance/contracts.h"
#include "conformance/harness/growth.h"
#include "quern/data_source.h"

namespace quern::conformance {

namespace {

constexpr Geometry kGeometry{3, 7};
constexpr std::int64_t kMostBatches = 2000;

constexpr std::uint64_t kSeed = 5;

struct Opened {
  std::unique_ptr<Dataset> dataset;
  std::unique_ptr<DataSource> source;

  Opened(const Subject& subject, Split split, bool documents = false, std::uint64_t seed = kSeed)
      : dataset(subject.make<Dataset>()) {
    DataRequest request;
    request.split = split;
    request.geometry = kGeometry;
    request.seed = seed;
    request.documents = documents;
    source = dataset->open(request);
    need(source != nullptr, "what open() returns", "null", "a source");
  }
  /// As a run does, with the object of the batch before.
  const Batch& next() {
    source->next(batch);
    return batch;
  }
  Batch batch;
};

std::string place(const std::string& what, std::int64_t batch, std::int64_t token) {
  return what + " of batch " + std::to_string(batch) + ", row " + std::to_string(token / kGeometry.sequence) +
         ", position " + std::to_string(token % kGeometry.sequence);
}

/// First tokens of documents, and the number of tokens behind them; a row where the batch names none.
std::vector<std::int32_t> document_starts(const Batch& batch, std::int64_t number) {
  std::vector<std::int32_t> starts = batch.documents;
  const auto tokens = static_cast<std::int32_t>(kGeometry.tokens()),
             row = static_cast<std::int32_t>(kGeometry.sequence);
  if (starts.empty())
    for (std::int32_t start = 0; start <= tokens; start += row) starts.push_back(start);
  const std::string what = "documents of batch " + std::to_string(number);
  const bool ascend = std::adjacent_find(starts.begin(), starts.end(), std::greater_equal<>()) == starts.end();
  need(ascend && starts.front() == 0 && starts.back() == tokens, what, "others",
       "ascending offsets from 0 to " + std::to_string(tokens));
  for (std::int32_t start = 0; start < tokens; start += row)
    need(std::binary_search(starts.begin(), starts.end(), start), what, "none that starts at " + std::to_string(start),
         "one at the start of each row");
  return starts;
}

/// Of data without tokens: as many elements of each input in every batch, one target a token or a row.
void check_inputs(const Batch& batch, const Batch& first, std::int64_t number) {
  const std::string of = " of batch " + std::to_string(number);
  const auto targets = static_cast<std::int64_t>(batch.targets.size());
  need(targets == kGeometry.batch || targets == kGeometry.tokens(), "targets" + of, std::to_string(targets),
       "one a row or one a token");
  const auto positions = static_cast<std::int64_t>(batch.positions.size());
  need(positions == 0 || positions == kGeometry.tokens(), "positions" + of, std::to_string(positions),
       "none, or one a token");
  need(!batch.inputs.empty(), "inputs" + of, "none", "some");
  need(batch.inputs.size() == first.inputs.size(), "inputs" + of, std::to_string(batch.inputs.size()),
       std::to_string(first.inputs.size()));
  for (const auto& [name, bytes] : batch.inputs) {
    auto known = first.inputs.find(name);
    need(known != first.inputs.end() && known->second.size() == bytes.size() && !bytes.empty(), "input " + name + of,
         std::to_string(bytes.size()) + " bytes", "as many as in the first batch");
    need(bytes.size() % static_cast<std::size_t>(kGeometry.batch) == 0, "input " + name + of,
         std::to_string(bytes.size()) + " bytes", "as many in each row");
  }
}

void check_batch(const Batch& batch, std::int64_t number, std::int64_t vocabulary, bool documents) {
  const std::int64_t tokens = kGeometry.tokens();
  for (auto [list, name] :
       {std::pair{&batch.tokens, "tokens"}, {&batch.targets, "targets"}, {&batch.positions, "positions"}})
    need(static_cast<std::int64_t>(list->size()) == tokens, std::string(name) + " of batch " + std::to_string(number),
         std::to_string(list->size()), std::to_string(tokens));
  const std::vector<std::int32_t> starts = document_starts(batch, number);
  for (std::int64_t i = 0, document = 0; i < tokens; ++i) {
    const auto at = static_cast<std::size_t>(i);
    while (starts[static_cast<std::size_t>(document) + 1] <= i) ++document;
    const std::int32_t token = batch.tokens[at], target = batch.targets[at];
    need(token >= 0 && token < vocabulary, place("token", number, i), std::to_string(token),
         "0 to " + std::to_string(vocabulary - 1));
    need(target >= -1 && target < vocabulary, place("target", number, i), std::to_string(target),
         "-1 to " + std::to_string(vocabulary - 1));
    const std::int64_t position = i - starts[static_cast<std::size_t>(document)];
    need(batch.positions[at] == position, place("position", number, i), std::to_string(batch.positions[at]),
         std::to_string(position));
    const bool ends_document = starts[static_cast<std::size_t>(document) + 1] == i + 1;
    const bool ends_row = (i + 1) % kGeometry.sequence == 0;
    if (target < 0 || ends_row) continue;
    need(!documents || !ends_document, place("target", number, i), std::to_string(target),
         "-1, for the next token is another document's");
    need(target == batch.tokens[at + 1], place("target", number, i), std::to_string(target),
         std::to_string(batch.tokens[at + 1]) + ", the next token");
  }
}

/// Batches of an epoch, and some of the next.
std::int64_t batches_of(const DataSource& source) {
  need(source.epoch_tokens() > 0, "epoch_tokens()", std::to_string(source.epoch_tokens()), "more than 0");
  return std::min(kMostBatches, source.epoch_tokens() / kGeometry.tokens() + 5);
}

std::string batches(const Subject& subject, Split split, bool documents) {
  Opened opened(subject, split, documents);
  const std::int64_t count = batches_of(*opened.source), vocabulary = opened.source->vocabulary();
  std::int64_t targets = 0;
  Batch first;
  for (std::int64_t number = 0; number < count; ++number) {
    const Batch batch = opened.next();
    if (number == 0) first = batch;
    vocabulary > 0 ? check_batch(batch, number, vocabulary, documents) : check_inputs(batch, first, number);
    targets +=
        std::count_if(batch.targets.begin(), batch.targets.end(), [](std::int32_t target) { return target >= 0; });
  }
  need(targets > 0, "targets that count", "none", "some");
  return std::to_string(count) + " batches, vocabulary " + std::to_string(vocabulary) + ", an epoch of " +
         std::to_string(opened.source->epoch_tokens()) + " tokens";
}

std::string packed(const Subject& subject, Split split) {
  try {
    Opened(subject, split, true);
  } catch (const Error& error) {
    need(error.code() != ErrorCode::internal, "a request for packed documents", error.what(), "a source, or a refusal");
    return std::string("refused: ") + error.what();
  }
  return batches(subject, split, true);
}

bool same(const Batch& a, const Batch& b) {
  return a.tokens == b.tokens && a.targets == b.targets && a.positions == b.positions && a.documents == b.documents &&
         a.inputs == b.inputs;
}

std::string repeats(const Subject& subject, Split split) {
  Opened one(subject, split), two(subject, split);
  const std::int64_t count = batches_of(*one.source);
  for (std::int64_t number = 0; number < count; ++number)
    need(same(one.next(), two.next()), "batch " + std::to_string(number) + " of a second source with the same seed",
         "others", "the same");
  return std::to_string(count) + " batches";
}

/// Another seed is another order, and no row comes twice in a pass over the training data, if rows have names.
std::string shuffles(const Subject& subject) {
  Opened one(subject, Split::train), other(subject, Split::train, false, kSeed + 1);
  const std::int64_t rows = one.source->epoch_tokens() / kGeometry.sequence;
  std::set<std::string> names;
  bool differs = false;
  std::int64_t named = 0;
  for (std::int64_t first = 0; first + kGeometry.batch <= rows && first < kMostBatches; first += kGeometry.batch) {
    const Batch batch = one.next();
    differs = differs || !same(batch, other.next());
    for (const std::string& name : batch.names)
      need(names.insert(name).second, "row \"" + name + "\" in one pass over the data", "twice", "once"), ++named;
  }
  need(differs || rows < 2 * kGeometry.batch, "a pass with another seed", "the same batches", "others");
  return std::to_string(named) + " rows with names, each once";
}

/// In the middle of an epoch and behind its end.
std::string source_resumes(const Subject& subject, Split split) {
  Opened straight(subject, split);
  const std::int64_t count = batches_of(*straight.source);
  for (std::int64_t number = 0; number < count; ++number) {
    if (number == count / 2 || number == count - 1 || number == 1) {
      Opened again(subject, split), ahead(subject, split);
      const std::string state = straight.source->save_state();
      ahead.next();  // loading leaves nothing of where a source was
      for (Opened* opened : {&again, &ahead}) opened->source->load_state(state);
      for (std::int64_t i = 0; i < 4; ++i, ++number) {
        const Batch want = straight.next();
        for (Opened* opened : {&again, &ahead})
          need(same(opened->next(), want),
               "batch " + std::to_string(number) + ", " + std::to_string(i) + " after load_state()", "another",
               "the one that follows where the state was saved");
      }
    }
    straight.next();
  }
  return "";
}

}  // namespace

void check_dataset(Report& report, const Subject& subject) {
  bool any = false;
  for (auto [split, name] : {std::pair{Split::train, "train"}, {Split::validation, "validation"}}) {
    if (!subject.make<Dataset>()->has(split)) continue;
    any = true;
    const std::string prefix = std::string(name) + ": ";
    const Split of = split;
    report.contract(prefix + "batches", [&] { return batches(subject, of, false); });
    report.contract(prefix + "packed documents", [&] { return packed(subject, of); });
    report.contract(prefix + "determinism", [&] { return repeats(subject, of); });
    if (split == Split::train) report.contract(prefix + "order", [&] { return shuffles(subject); });
    report.contract(prefix + "save and restore", [&] { return source_resumes(subject, of); });
    report.contract(prefix + "batches leave nothing", [&] {
      Opened opened(subject, of);
      const std::string start = opened.source->save_state();
      return need_no_growth("a batch, and a load_state()", [&] {
        opened.next();
        opened.source->load_state(start);
      });
    });
  }
  if (!any)
    report.contract("batches", []() -> std::string { throw Skipped{"no data: name some with --set key=value"}; });
}

}  // namespace quern::conformance
