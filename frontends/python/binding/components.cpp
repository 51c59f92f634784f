#include "components.h"

#include <cstdint>
#include <utility>

#include "log/jsonl_sink.h"
#include "quern/error.h"

namespace quern::python {

namespace {

using nlohmann::json;

std::string ask(Callback callback, const char* method, const std::string& arguments) {
  std::string answer;
  if (callback(method, arguments.c_str(), &answer) != 0)
    throw Error(ErrorCode::input,
                {.where = std::string("the program's ") + (method == std::string("log") ? "log" : "data"),
                 .what = std::move(answer)});
  return answer;
}

class Source final : public DataSource {
 public:
  Source(Callback callback, const DataRequest& request) : callback_(callback), request_(request) {
    const std::string rows = ask("length");
    rows_ = rows.empty() ? request.geometry.batch : std::stoll(rows);
  }
  std::int64_t vocabulary() const override { return request_.vocabulary; }
  std::int64_t epoch_tokens() const override { return rows_ * request_.geometry.sequence; }
  void next(Batch& batch) override {
    const Geometry& geometry = request_.geometry;
    const auto size = static_cast<std::size_t>(geometry.tokens());
    batch = {};
    for (auto* values : {&batch.tokens, &batch.targets, &batch.positions}) values->resize(size);
    auto address = [](std::vector<std::int32_t>& values) { return reinterpret_cast<std::uintptr_t>(values.data()); };
    ask("next", {{"rows", geometry.batch},
                 {"sequence", geometry.sequence},
                 {"vocabulary", request_.vocabulary},
                 {"tokens", address(batch.tokens)},
                 {"targets", address(batch.targets)},
                 {"positions", address(batch.positions)}});
    if (!request_.documents) return;
    for (std::size_t i = 0; i < size; ++i)
      if (batch.positions[i] == 0) batch.documents.push_back(static_cast<std::int32_t>(i));
    batch.documents.push_back(static_cast<std::int32_t>(size));
  }
  std::string save_state() const override { return ask("save_state"); }
  void load_state(const std::string& state) override { ask("load_state", {{"state", state}}); }

 private:
  std::string ask(const char* method, json arguments = json::object()) const {
    arguments["split"] = request_.split == Split::train ? "train" : "validation";
    arguments["documents"] = request_.documents;
    return python::ask(callback_, method, arguments.dump());
  }

  Callback callback_;
  DataRequest request_;
  std::int64_t rows_ = 0;
};

class Data final : public Dataset {
 public:
  explicit Data(Callback callback) : callback_(callback) {}
  bool has(Split split) const override { return split == Split::train || ask(callback_, "validates", "{}") == "yes"; }
  std::unique_ptr<DataSource> open(const DataRequest& request) const override {
    return std::make_unique<Source>(callback_, request);
  }

 private:
  Callback callback_;
};

class Sink final : public LogSink {
 public:
  explicit Sink(Callback callback) : callback_(callback) {}
  void open(const RunPlace&) override {}
  void write(const LogEvent& event) override { ask(callback_, "log", to_json_line(event)); }

 private:
  Callback callback_;
};

}  // namespace

Manifest components(Callback callback) {
  Manifest manifest;
  manifest.add<Dataset>("python", "rows of tokens from the calling program", {},
                        [callback](const OptionValues&) { return std::make_unique<Data>(callback); });
  manifest.add<LogSink>("python", "a function of the calling program", {},
                        [callback](const OptionValues&) { return std::make_unique<Sink>(callback); });
  return manifest;
}

}  // namespace quern::python
