#include "log/console_sink.h"

#include <cmath>
#include <sstream>

#include <doctest/doctest.h>

using namespace quern;

namespace {

LogEvent step(std::int64_t number, double loss) {
  return {"step",
          {{"step", number},
           {"steps", std::int64_t{1000}},
           {"tokens", std::int64_t{61440}},
           {"loss", loss},
           {"lr", 3e-4},
           {"grad_norm", 1.234},
           {"tokens_per_second", 3412.0},
           {"time", 18.0},
           {"eta", 130.0}}};
}

const LogEvent kEval{"eval", {{"step", std::int64_t{120}}, {"tokens", std::int64_t{61440}}, {"loss", 4.7}}};

}  // namespace

TEST_CASE("steps are aligned lines") {
  CHECK(to_console_line(step(120, 4.8123)) ==
        "step   120/1000  loss 4.8123   lr 3.0e-04  norm 1.23   3.41k tok/s  eta 2m10s");
  CHECK(to_console_line(step(1, 10.81239)) ==
        "step     1/1000  loss 10.8124  lr 3.0e-04  norm 1.23   3.41k tok/s  eta 2m10s");
  CHECK(to_console_line(step(120, std::nan(""))) ==
        "step   120/1000  loss nan      lr 3.0e-04  norm 1.23   3.41k tok/s  eta 2m10s");
}

TEST_CASE("fields that are not there are left out") {
  CHECK(to_console_line({"step", {{"step", std::int64_t{7}}, {"loss", 2.5}}}) == "step  7  loss 2.5000");
  CHECK(to_console_line({"end", {}}) == "end");
  CHECK(to_console_line({"run", {{"name", std::string("a")}, {"steps", std::int64_t{3}}}}) == "run    a  3 steps");
}

TEST_CASE("every kind of event has its line") {
  CHECK(to_console_line({"run",
                         {{"name", std::string("tiny")},
                          {"model", std::string("llama")},
                          {"parameters", std::int64_t{494032768}},
                          {"device", std::string("cpu")},
                          {"precision", std::string("bf16")},
                          {"steps", std::int64_t{1000}},
                          {"tokens_per_step", std::int64_t{524288}}}}) ==
        "run    tiny  llama  494M parameters  cpu  bf16  1000 steps of 524k tokens");
  CHECK(to_console_line(kEval) == "eval   step 120  61.4k tokens  loss 4.7000");
  CHECK(to_console_line({"start", {{"seconds", 12.34}, {"plan", 0.04}, {"kernels", 8.16}, {"first_step", 4.14}}}) ==
        "start  12s: plan 0.0, kernels 8.2, first step 4.1");
  CHECK(to_console_line({"checkpoint", {{"step", std::int64_t{120}}, {"path", std::string("runs/a")}}}) ==
        "saved  step 120  runs/a");
  CHECK(to_console_line({"warning", {{"text", std::string("slow disk")}}}) == "warning: slow disk");
  CHECK(to_console_line({"end",
                         {{"step", std::int64_t{1000}},
                          {"tokens", std::int64_t{524288000}},
                          {"loss", 3.5},
                          {"val_loss", 3.75},
                          {"time", 725.0},
                          {"tokens_per_second", 3412.0},
                          {"export", std::string("runs/a/hf")}}}) ==
        "end    1000 steps  524M tokens  loss 3.5000  val loss 3.7500  12m05s  3.41k tok/s  exported to runs/a/hf");
  CHECK(to_console_line({"probe", {{"amax", 0.25}, {"layer", std::int64_t{3}}, {"of", std::string("qkv")}}}) ==
        "probe  amax 0.25  layer 3  of qkv");
}

TEST_CASE("the data of a step that stands out are for files, and its line is short") {
  std::string data;
  for (int i = 0; i < 4096; ++i) data += "data/train.tok window " + std::to_string(i) + ", ";
  CHECK(to_console_line({"spike",
                         {{"step", std::int64_t{120}},
                          {"what", std::string("loss")},
                          {"value", 9.125},
                          {"z", 7.96},
                          {"mean", 4.5},
                          {"deviation", 0.58},
                          {"data", data}}}) == "spike  step 120  loss 9.1250  mean 4.5000  z 8.0");
  const std::string line =
      to_console_line({"non_finite", {{"step", std::int64_t{120}}, {"action", std::string("skip")}, {"data", data}}});
  CHECK(line.starts_with("non_finite  step 120  action skip  data data/train.tok window 0, "));
  CHECK(line.size() < 150);
}

TEST_CASE("plain output is lines without control characters, whatever the texts are") {
  std::ostringstream out;
  ConsoleSink sink(out, ConsoleStyle::plain);
  sink.write(step(1, 5.0));
  sink.write({"warning", {{"text", std::string("\x1b[2Jbad\rname\x7f")}}});
  sink.write(kEval);
  std::string text = out.str();
  CHECK(text.find("warning: ?[2Jbad?name?\n") != std::string::npos);
  for (char c : text) CHECK((c == '\n' || (c >= ' ' && c != 0x7f)));
}

TEST_CASE("on a terminal steps rewrite one line, which other events leave standing") {
  std::ostringstream out;
  const std::string start = "\r\x1b[K\x1b[?7l", stop = "\x1b[?7h";
  const std::string one = start + to_console_line(step(1, 5.0)) + stop,
                    two = start + to_console_line(step(2, 4.0)) + stop;
  const std::string eval = "\x1b[1m" + to_console_line(kEval) + "\x1b[0m\n";
  {
    ConsoleSink sink(out, ConsoleStyle::terminal);
    sink.write(step(1, 5.0));
    sink.write(step(2, 4.0));
    CHECK(out.str() == one + two);
    sink.write(kEval);
    CHECK(out.str() == one + two + "\n" + eval);
    sink.write(kEval);
    CHECK(out.str() == one + two + "\n" + eval + eval);
    sink.write(step(2, 4.0));
  }
  CHECK(out.str() == one + two + "\n" + eval + eval + two + "\n");
}

TEST_CASE("figures of single tensors are not for the console") {
  std::ostringstream out;
  ConsoleSink sink(out, ConsoleStyle::plain);
  sink.write({"scale", {{"step", std::int64_t{5}}, {"tensor", std::string("ffn_norm.e4m3")}, {"amax", 2.5}}});
  CHECK(out.str() == "");
}

TEST_CASE("telemetry is shown when the clocks are held down, and when the reason changes") {
  std::ostringstream out;
  ConsoleSink sink(out, ConsoleStyle::plain);
  auto telemetry = [&](const char* reason) {
    sink.write({"telemetry", {{"step", std::int64_t{5}}, {"power_W", 640.5}, {"slowed_by", std::string(reason)}}});
  };
  telemetry("");
  CHECK(out.str() == "");
  telemetry("power limit");
  telemetry("power limit");
  CHECK(out.str() == "telemetry  step 5  power_W 640.5  slowed_by power limit\n");
  telemetry("");
  telemetry("temperature");
  CHECK(out.str().find("slowed_by temperature") != std::string::npos);
}
