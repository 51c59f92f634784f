// What the engine asks of a device, a store and a communicator, call by call, for schedules made by hand and for the
// schedules of a small model.
#include "engine/engine.h"

#include <algorithm>

#include <doctest/doctest.h>

#include "engine/progress.h"
#include "engine/recording_device.h"
#include "plan/time/step_time.h"
#include "program/names.h"
#include "quern/error.h"

using namespace quern;

namespace {

using Calls = std::vector<std::string>;

/// A plan of 256 bytes of arena and one store, whose runs are made by hand. `refresh` and `update` are runs that an
/// engine does as they are.
struct HandMade {
  Plan plan;

  HandMade() {
    plan.options.uploads = 2;
    plan.device_bytes = 256;
    plan.staging_slot_bytes = 32;
    plan.pinned_bytes = 2 * 32 + 48;
    plan.stores.push_back({"recording", 1024});
    const Operand operand{.dtype = DType::f32, .extents = {4}, .present = true};
    plan.schedules.tasks.push_back(
        {.instance = {.kind = "op", .inputs = {operand, operand}, .outputs = {operand}, .geometry = {}}, .name = "op"});
    plan.schedules.tasks.push_back(
        {.instance = {.kind = "all_reduce", .inputs = {operand}, .outputs = {operand}, .geometry = {}},
         .name = "all_reduce gradient"});
  }
  RunSchedule& operator[](Run run) {
    plan.schedules[run].name = name_of(run);
    return plan.schedules[run];
  }
  static Access at(std::int64_t offset, Space space = Space::device) { return {{space, 0, offset, 16}, 0}; }

  void launch(Run run, Lane lane = Lane::compute) {
    const Access in[] = {at(0), {}}, out[] = {at(16), {}};
    (*this)[run].add({.kind = ActionKind::launch, .lane = lane, .task = 0}, in, out);
  }
  void get(Run run) {
    const Access from = at(128, Space::store), to = at(64);
    (*this)[run].add({.kind = ActionKind::get, .lane = Lane::copy_in}, {&from, 1}, {&to, 1});
  }
  void put(Run run) {
    const Access from = at(64), to = at(128, Space::store);
    (*this)[run].add({.kind = ActionKind::put, .lane = Lane::copy_out}, {&from, 1}, {&to, 1});
  }
  void reduce(Run run, Lane lane = Lane::compute) {
    const Access place = at(32);
    (*this)[run].add({.kind = ActionKind::collective, .lane = lane, .task = 1}, {&place, 1}, {&place, 1});
  }
  void order(Run run, Lane later, Lane earlier) {
    const std::int32_t event = (*this)[run].events++;
    (*this)[run].add({.kind = ActionKind::record, .lane = earlier, .event = event}, {}, {});
    (*this)[run].add({.kind = ActionKind::wait, .lane = later, .event = event}, {}, {});
  }
};

/// A device, a store and an engine between them; recorded calls begin after it is made.
struct Rig {
  RecordingDevice device;
  RecordingStore store;
  std::unique_ptr<Engine> engine;

  explicit Rig(bool captures, bool store_captures = true) : store(device, store_captures) {
    device.device_traits.can_capture = captures;
  }
  Rig(Plan plan, bool captures, bool store_captures = true) : Rig(captures, store_captures) { start(std::move(plan)); }
  void start(Plan plan) {
    const std::vector<OffloadStore*> stores(plan.stores.size(), &store);
    engine = std::make_unique<Engine>(device, std::move(plan), stores);
    device.take();
    device.runs.clear();
  }
};

Batch batch_of(const Geometry& geometry) {
  Batch batch;
  for (std::int32_t i = 0; i < geometry.tokens(); ++i) {
    batch.tokens.push_back(i);
    batch.targets.push_back(i + 100);
    batch.positions.push_back(i + 200);
  }
  return batch;
}

std::ptrdiff_t count(const Calls& calls, const std::string& beginning) {
  return std::count_if(calls.begin(), calls.end(), [&](const auto& call) { return call.starts_with(beginning); });
}

std::size_t launches(const RunSchedule& schedule) {
  return static_cast<std::size_t>(std::count_if(schedule.actions.begin(), schedule.actions.end(),
                                                [](const Action& a) { return a.kind == ActionKind::launch; }));
}

}  // namespace

TEST_CASE("kernels are prepared once each before memory is taken, which is zeroed and given back") {
  HandMade made;
  made.launch(Run::refresh);
  made.launch(Run::update);
  Rig rig(false);
  auto engine = std::make_unique<Engine>(rig.device, made.plan, std::vector<OffloadStore*>{&rig.store});
  CHECK(rig.device.take() == Calls{"prepare op", "allocate device", "allocate pinned", "reserve 1024",
                                   "fill arena+0 with 0, 256, compute", "synchronize compute"});
  engine.reset();
  CHECK(rig.device.take() == Calls{"release pinned", "release device"});
}

TEST_CASE("each kind of action is one call, in the order and on the lane that the schedule says") {
  HandMade made;
  made.get(Run::refresh);
  made.order(Run::refresh, Lane::compute, Lane::copy_in);
  made.launch(Run::refresh);
  const Access place = HandMade::at(96), result = HandMade::at(0, Space::results), workspace = HandMade::at(112);
  const Access in[] = {HandMade::at(0), HandMade::at(64)}, out[] = {HandMade::at(16), workspace};
  RunSchedule& schedule = made[Run::refresh];
  schedule.add({.kind = ActionKind::launch, .task = 0}, in, out);
  schedule.add({.kind = ActionKind::fill, .lane = Lane::communication, .byte = 9}, {}, {&place, 1});
  schedule.add({.kind = ActionKind::copy}, {&place, 1}, {&result, 1});
  made.put(Run::refresh);
  made.order(Run::refresh, Lane::host, Lane::copy_out);
  Rig rig(made.plan, false);
  rig.engine->refresh();
  // Event 0 is the engine's own; results are behind two slots of 32 bytes.
  CHECK(rig.device.take() == Calls{"get arena+64 from slot 7+128, 16, copy_in", "record event 1, copy_in",
                                   "wait event 1, compute", "launch op arena+0 - -> arena+16, compute",
                                   "launch op arena+0 arena+64 -> arena+16, workspace arena+112, compute",
                                   "fill arena+96 with 9, 16, communication", "copy arena+96 to pinned+64, 16, compute",
                                   "put arena+64 to slot 7+128, 16, copy_out", "record event 2, copy_out",
                                   "synchronize event 2"});
  CHECK(rig.device.runs == Calls{"refresh"});
}

TEST_CASE("a run that can be captured whole is one graph, made by its first use, with forks and joins for its lanes") {
  HandMade made;
  made.get(Run::refresh);
  made.order(Run::refresh, Lane::compute, Lane::copy_in);
  made.launch(Run::refresh);
  Rig rig(made.plan, true);
  const Calls outside_before{"record event 0, copy_in", "wait event 0, compute"},
      fork{"record event 0, compute", "wait event 0, copy_in"},
      join = outside_before,
      work{"get arena+64 from slot 7+128, 16, copy_in", "record event 1, copy_in", "wait event 1, compute",
           "launch op arena+0 - -> arena+16, compute"};
  Calls want = outside_before;
  auto append = [&](const Calls& more) { want.insert(want.end(), more.begin(), more.end()); };
  append({"capture compute {"});
  append(fork);
  append(work);
  append(join);
  append({"}", "graph, compute"});
  append(fork);  // outside: the lane goes on behind the graph
  rig.engine->refresh();
  CHECK(rig.device.take() == want);
  want = outside_before;
  append({"graph, compute"});
  append(fork);
  rig.engine->refresh();
  CHECK(rig.device.take() == want);
}

TEST_CASE("beside what cannot be captured, each range of launches is a graph") {
  HandMade made;
  made.launch(Run::refresh);
  made.launch(Run::refresh);
  made.get(Run::refresh);
  made.order(Run::refresh, Lane::compute, Lane::copy_in);
  made.launch(Run::refresh);
  made.launch(Run::refresh, Lane::communication);  // no graph by itself
  Rig rig(made.plan, true, false);
  const std::string launch = "launch op arena+0 - -> arena+16, ";
  rig.engine->refresh();
  CHECK(rig.device.take() == Calls{"capture compute {", launch + "compute", launch + "compute", "}", "graph, compute",
                                   "get arena+64 from slot 7+128, 16, copy_in", "record event 1, copy_in",
                                   "wait event 1, compute", "capture compute {", launch + "compute", "}",
                                   "graph, compute", launch + "communication"});
  rig.engine->refresh();
  CHECK(count(rig.device.take(), "graph") == 2);
}

TEST_CASE("collectives go to the communicator, in a graph if it can be captured, and are refused without one") {
  HandMade made;
  made.reduce(Run::update);
  made.launch(Run::update);
  Rig alone(made.plan, false);
  CHECK_THROWS_WITH_AS(alone.engine->update(), doctest::Contains("no communicator for all_reduce gradient"), Error);
  for (bool captures : {false, true}) {
    CAPTURE(captures);
    Rig rig(true);
    RecordingCommunicator communicator(rig.device, captures);
    rig.start(made.plan);
    rig.engine->join(communicator);
    CHECK(rig.device.take() == Calls{"pin 4096", "register arena+0, 256"});
    rig.engine->update();
    const std::string reduce = "all_reduce arena+32, compute", launch = "launch op arena+0 - -> arena+16, compute";
    const std::string begins = "word 0, communication", in = "word 1, compute", out = "word 2, compute";
    CHECK(rig.device.take() ==
          (captures ? Calls{begins, begins, "capture compute {", in, reduce, out, launch, "}", "graph, compute"}
                    : Calls{begins, begins, in, reduce, out, "capture compute {", launch, "}", "graph, compute"}));
  }
}

TEST_CASE("a collective of a program sums a copy of its operand, and without transfers copies it") {
  HandMade made;
  const Access from = HandMade::at(32), to = HandMade::at(48);
  made[Run::update].add({.kind = ActionKind::collective, .lane = Lane::communication, .task = 1}, {&from, 1}, {&to, 1});
  Rig rig(false);
  RecordingCommunicator communicator(rig.device, false);
  rig.start(made.plan);
  rig.engine->join(communicator);
  rig.device.take();
  rig.engine->update();
  const Calls calls = rig.device.take();
  const auto copy = std::find(calls.begin(), calls.end(), "copy arena+32 to arena+48, 16, communication");
  REQUIRE(copy != calls.end());
  CHECK(std::find(copy, calls.end(), "all_reduce arena+48, communication") != calls.end());
  rig.engine->skip_transfers();
  rig.device.take();
  rig.engine->update();
  const Calls skipped = rig.device.take();
  CHECK(std::find(skipped.begin(), skipped.end(), *copy) != skipped.end());
  CHECK(std::find(skipped.begin(), skipped.end(), "all_reduce arena+48, communication") == skipped.end());
}

TEST_CASE("streams say which collective they are in, and when the compute stream waits for one") {
  HandMade made;
  for (int i = 0; i < 3; ++i) {
    if (i == 2) made.order(Run::update, Lane::compute, Lane::communication);
    made.reduce(Run::update, Lane::communication);
  }
  made.launch(Run::refresh);
  for (bool captures : {false, true}) {
    CAPTURE(captures);
    Rig rig(captures);
    RecordingCommunicator communicator(rig.device, true);
    rig.start(made.plan);
    rig.engine->join(communicator);
    rig.engine->update();
    const std::shared_ptr<const Progress> progress = rig.engine->progress();
    CHECK(progress->number() == 6);
    CHECK_FALSE(progress->waiting());
    CHECK(progress->text(3) == "all_reduce gradient (update between steps)");
    if (!captures) {
      const std::string reduce = "all_reduce arena+32, communication";
      auto word = [](int value) { return "word " + std::to_string(value) + ", communication"; };
      rig.device.take();
      rig.engine->update();
      CHECK(rig.device.take() == Calls{word(0), word(3), word(1), reduce, word(3), reduce, word(4),
                                       "record event 1, communication", "word 1, compute", "wait event 1, compute",
                                       "word 0, compute", word(5), reduce, word(6)});
      CHECK(progress->number() == 12);
    }
    rig.engine->refresh();
    const std::string report = progress->report();
    CHECK(report.find("past all_reduce gradient (update between steps)") == 0);
    CHECK(report.find(" ago: refresh between steps\n") != std::string::npos);
    CHECK(report.find("  done  all_reduce gradient\n") != std::string::npos);
    rig.engine.reset();
    CHECK(progress->number() == (captures ? 6 : 12));  // after the engine
  }
}

TEST_CASE("a resident micro-step and an update are one graph each, and uploads and results are none") {
  RecordingDevice planner;
  const Plan plan = tiny_plan(tiny_options(), planner);
  Rig rig(plan, true);
  const Batch batch = batch_of(plan.options.geometry);
  for (int step = 0; step < 2; ++step) {
    CAPTURE(step);
    for (std::uint32_t micro_step = 0; micro_step < 3; ++micro_step) {
      StepState state;
      state.micro_step = micro_step;
      rig.engine->micro_step(batch, state, {.first = micro_step == 0, .last = micro_step == 2});
      const Calls calls = rig.device.take();
      CHECK(count(calls, "copy pinned+") == 4);
      CHECK(calls[4].starts_with(step == 0 && micro_step < 2 ? "capture" : "graph"));
      CHECK(count(calls, "graph") == 1);
      CHECK(static_cast<std::size_t>(count(calls, "launch")) ==
            (step > 0 || micro_step == 2 ? 0 : launches(plan.schedules[micro_step == 0 ? Run::first : Run::later])));
    }
    rig.engine->update();
    CHECK(rig.device.take().back() == "graph, compute");
    rig.engine->result();
    const Calls calls = rig.device.take();
    REQUIRE(calls.size() == 4);
    CHECK(count(calls, "copy arena+") == 2);
    CHECK(calls[2].starts_with("record"));
    CHECK(calls[3].starts_with("synchronize event"));
  }
  CHECK(rig.device.runs == Calls{"upload", "first micro-step", "upload", "later micro-step", "upload",
                                 "later micro-step", "update", "result", "upload", "first micro-step", "upload",
                                 "later micro-step", "upload", "later micro-step", "update", "result"});
}

TEST_CASE("the run of a micro-step is chosen by its place in the step, observed or not") {
  RecordingDevice planner;
  PlanOptions options = stored_options(4, 1);
  options.observe = true;
  const Plan plan = tiny_plan(options, planner);
  Rig rig(plan, false);
  const Batch batch = batch_of(plan.options.geometry);
  auto run_of = [&](bool first, bool last, Observe observe) {
    rig.engine->micro_step(batch, {}, {first, last}, observe);
    rig.engine->result();  // so that no upload waits
    const Calls runs = std::exchange(rig.device.runs, {});
    return runs.at(1);
  };
  CHECK(run_of(true, false, Observe::no) == "first micro-step");
  CHECK(run_of(false, false, Observe::no) == "later micro-step");
  CHECK(run_of(false, true, Observe::no) == "last micro-step");
  CHECK(run_of(true, true, Observe::no) == "only micro-step");
  CHECK(run_of(true, false, Observe::yes) == "first micro-step, observed");
  CHECK(run_of(false, false, Observe::yes) == "later micro-step, observed");
  CHECK(run_of(false, true, Observe::yes) == "last micro-step, observed");
  CHECK(run_of(true, true, Observe::yes) == "only micro-step, observed");
}

TEST_CASE("uploads take slots of the staging memory alternately, and wait when all are on their way") {
  RecordingDevice planner;
  PlanOptions options = tiny_options();
  options.uploads = 2;
  const Plan plan = tiny_plan(options, planner);
  Rig rig(plan, false);
  const Batch batch = batch_of(options.geometry);
  const std::string second = "pinned+" + std::to_string(plan.staging_slot_bytes);
  auto upload = [&] {
    rig.engine->micro_step(batch, {});
    return rig.device.take();
  };
  CHECK(upload()[0].starts_with("copy pinned+0 to "));
  CHECK(upload()[0].starts_with("copy " + second + " to "));
  const Calls third = upload();
  CHECK(third[0] == "synchronize compute");
  CHECK(third[1].starts_with("copy pinned+0 to "));
  rig.engine->result();  // waits for all of them
  rig.device.take();
  CHECK(upload()[0].starts_with("copy " + second + " to "));
  CHECK(upload()[0].starts_with("copy pinned+0 to "));
  CHECK(upload()[0] == "synchronize compute");
}

TEST_CASE("an upload brings the batch, where its documents end, and the step's state") {
  RecordingDevice planner;
  PlanOptions options = tiny_options();
  options.documents = true;
  const Plan plan = tiny_plan(options, planner);
  Rig rig(plan, false);
  Batch batch = batch_of(options.geometry);
  auto words = [&](const char* kind) {
    const PlannedTensor& tensor = plan.tensor({kind});
    std::vector<std::int32_t> values(static_cast<std::size_t>(tensor.bytes()) / 4);
    rig.engine->read(tensor, values.data());
    return values;
  };
  StepState state;
  state.step = 41;
  rig.engine->micro_step(batch, state);
  CHECK(words(names::kTokens) == batch.tokens);
  CHECK(words(names::kTargets) == batch.targets);
  CHECK(words(names::kPositions) == batch.positions);
  CHECK(words(names::kStep)[0] == 41);
  std::vector<std::int32_t> starts(17, 16);
  starts[0] = 0;
  starts[1] = 8;
  CHECK(words(names::kDocuments) == starts);  // one a row
  batch.documents = {0, 3, 8, 15, 16};
  rig.engine->micro_step(batch, state);
  std::copy(batch.documents.begin(), batch.documents.end(), starts.begin());
  CHECK(words(names::kDocuments) == starts);
}

TEST_CASE("batches that do not fit the plan are refused") {
  RecordingDevice planner;
  PlanOptions options = tiny_options();
  options.documents = true;
  Rig rig(tiny_plan(options, planner), false);
  const Batch good = batch_of(options.geometry);
  auto refused = [&](const Batch& batch, const char* message) {
    CHECK_THROWS_WITH_AS(rig.engine->micro_step(batch, {}), doctest::Contains(message), Error);
    rig.engine->result();
  };
  Batch batch = good;
  batch.tokens.pop_back();
  refused(batch, "input tokens: the data give it in another size than the model reads: found 15 elements");
  batch = good;
  batch.targets.push_back(0);
  refused(batch, "expected (16) i32");
  batch = good;
  batch.positions.clear();
  refused(batch, "input positions: the data do not give it: expected (16) i32");
  // Not from 0; not to the end; not ascending; none at the start of a row; a single one.
  for (std::vector<std::int32_t> documents : {std::vector<std::int32_t>{1, 8, 16},
                                              {0, 8, 15},
                                              {0, 8, 8, 16},
                                              {0, 5, 4, 8, 16},
                                              {0, 5, 9, 16},
                                              {0, 16},
                                              {0}}) {
    batch = good;
    batch.documents = std::move(documents);
    refused(batch, "documents are not ascending offsets");
  }
}

TEST_CASE("tensors that the plan does not have are refused") {
  RecordingDevice planner;
  const Plan plan = tiny_plan(tiny_options(), planner);
  const Batch batch = batch_of(plan.options.geometry);
  Rig rig(plan, false);
  CHECK_THROWS_WITH_AS(rig.engine->micro_step(batch, {}, {}, Observe::yes), doctest::Contains("observations are not"),
                       Error);
  CHECK_THROWS_WITH_AS(rig.engine->observe_weights(), doctest::Contains("observations are not"), Error);
  CHECK_THROWS_WITH_AS(rig.engine->logits(batch), doctest::Contains("no logits program"), Error);
  CHECK_THROWS_WITH_AS(rig.engine->next_logits(batch, {0, 8}), doctest::Contains("no program for the next"), Error);
  const Plan stored = tiny_plan(stored_options(15, 1), planner);
  CHECK_THROWS_WITH_AS(Engine(rig.device, stored), doctest::Contains("not one store for each of the plan's"), Error);

  PlanOptions options = tiny_options();
  options.next_logits = true;
  Rig with(tiny_plan(options, planner), false);
  for (const std::vector<std::int32_t>& rows : {std::vector<std::int32_t>{0}, {0, 16}, {-1, 8}})
    CHECK_THROWS_WITH_AS(with.engine->next_logits(batch, rows), doctest::Contains("not one index"), Error);
  CHECK(with.engine->next_logits(batch, {7, 15}).size() == 2 * 37);
}

TEST_CASE("a tensor in a store is read and written through the slots, part by part") {
  HandMade made;
  made.plan.ring = {.offset = 64, .bytes = 64};
  const PlannedTensor tensor{{}, TensorOwner::input, DType::f32, {25}, 128, 0};  // 100 bytes
  std::vector<std::byte> host(100);
  Rig rig(made.plan, false);
  const Calls all{"synchronize copy_in", "synchronize copy_out", "synchronize communication", "synchronize compute"};
  auto with = [&](Calls work) {
    work.insert(work.begin(), all.begin(), all.end());
    work.insert(work.end(), 2, "synchronize compute");
    return work;
  };
  rig.engine->write(tensor, host.data());
  CHECK(rig.device.take() == with({"copy host to arena+64, 64, compute", "put arena+64 to slot 7+128, 64, compute",
                                   "copy host to arena+64, 36, compute", "put arena+64 to slot 7+192, 36, compute"}));
  rig.engine->read(tensor, host.data());
  CHECK(rig.device.take() == with({"get arena+64 from slot 7+128, 64, compute", "copy arena+64 to host, 64, compute",
                                   "get arena+64 from slot 7+192, 36, compute", "copy arena+64 to host, 36, compute"}));
}

TEST_CASE(
    "a profile has the times of all actions of a step's runs and of an accumulating micro-step, and captures nothing") {
  RecordingDevice planner;
  const Plan plan = tiny_plan(tiny_options(), planner);
  for (std::int64_t micro_batches : {1, 2, 3}) {
    Rig rig(plan, true);
    const auto times = rig.engine->profile(batch_of(plan.options.geometry), {}, micro_batches);
    const Calls calls = rig.device.take();
    CHECK(count(calls, "capture") == 0);
    CHECK(count(calls, "graph") == 0);
    for (const auto& [run, often] : runs_of_step(plan, micro_batches)) CHECK(times.count(run) == 1);
    for (Run run : {Run::later, Run::update, Run::apply}) CHECK(times.count(run) == 1);
    for (const auto& [run, of_run] : times) {
      const RunSchedule& schedule = plan.schedules[run];
      CAPTURE(schedule.name);
      REQUIRE(of_run.size() == schedule.actions.size());
      double last = 0;
      for (std::size_t i = 0; i < of_run.size(); ++i) {
        const Action& action = schedule.actions[i];
        CHECK(of_run[i].begin >= (action.lane == Lane::compute && action.kind == ActionKind::launch ? last : 0));
        if (action.kind != ActionKind::launch) continue;
        CHECK(of_run[i].end - of_run[i].begin == doctest::Approx(2e-3));  // calls: the event before it, and the launch
        last = of_run[i].end;
      }
    }
  }
}
