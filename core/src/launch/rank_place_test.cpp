#include "launch/rank_place.h"

#include <doctest/doctest.h>

#include <map>

#include "quern/error.h"
#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

using Variables = std::map<std::string, std::string>;

std::optional<RankPlace> place_in(const Variables& variables) {
  return rank_place([&](const char* name) {
    const auto at = variables.find(name);
    return at == variables.end() ? nullptr : at->second.c_str();
  });
}

/// The variable that is refused.
std::string refused_in(const Variables& variables) {
  const Error error = testkit::error_of([&] { place_in(variables); });
  CHECK(error.code() == ErrorCode::config);
  return error.detail().where;
}

const Variables kOwn = {
    {"QUERN_RANK", "3"}, {"QUERN_RANKS", "4"}, {"QUERN_LOCAL_RANK", "1"}, {"QUERN_LOCAL_RANKS", "2"}};
const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"TORCHELASTIC_RUN_ID", "a b"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"}};
const Variables kMpirun = {{"OMPI_COMM_WORLD_RANK", "65535"},
                           {"OMPI_COMM_WORLD_SIZE", "65536"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "7"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"}};
const Variables kSrun = {{"SLURM_JOB_ID", "17"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "8"},
                         {"SLURM_NTASKS", "11"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NODEID", "2"},
                         {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"}};

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

}  // namespace

TEST_CASE("each launcher's variables give the place") {
  CHECK(!place_in({}));
  struct Case {
    Variables variables;
    RankPlace want;
  };
  const Case cases[] = {{kOwn, {3, 4, 1, 2, "quern", ""}},
                        {kTorchrun, {5, 8, 1, 4, "torchrun", "a-b-2"}},
                        {kMpirun, {65535, 65536, 7, 8, "mpirun", ""}},
                        {kSrun, {8, 11, 0, 3, "srun", "17-0"}}};
  Variables all;
  for (const auto& [variables, want] : cases) {
    const std::optional<RankPlace> got = place_in(variables);
    REQUIRE(got);
    CAPTURE(want.source);
    CHECK(got->rank == want.rank);
    CHECK(got->size == want.size);
    CHECK(got->local_rank == want.local_rank);
    CHECK(got->local_size == want.local_size);
    CHECK(got->source == want.source);
    CHECK(got->launch == want.launch);
    all.insert(variables.begin(), variables.end());
  }
  CHECK(place_in(without(kTorchrun, "LOCAL_WORLD_SIZE"))->local_size == 2);  // as far as one rank knows
  CHECK(place_in(all)->source == "quern");
}

TEST_CASE("a Slurm job is a rank only in a step of several tasks") {
  CHECK(!place_in(without(kSrun, "SLURM_STEP_ID")));
  CHECK(!place_in(with(kSrun, "SLURM_STEP_NUM_TASKS", "1")));  // the shell of an interactive allocation
  CHECK(!place_in(with(kSrun, "SLURM_NTASKS", "1")));
}

TEST_CASE("variables that are half set or make no sense are refused by name") {
  CHECK(refused_in({{"RANK", "0"}}) == "environment variable WORLD_SIZE");
  CHECK(refused_in(without(kTorchrun, "LOCAL_RANK")) == "environment variable LOCAL_RANK");
  CHECK(refused_in(with(kOwn, "QUERN_RANK", "4")) == "environment variable QUERN_RANK");
  CHECK(refused_in(with(kOwn, "QUERN_RANK", "1x")) == "environment variable QUERN_RANK");
  CHECK(refused_in(with(kOwn, "QUERN_RANKS", "")) == "environment variable QUERN_RANKS");
  CHECK(refused_in(with(kOwn, "QUERN_LOCAL_RANKS", "5")) == "environment variable QUERN_LOCAL_RANKS");
  CHECK(refused_in(with(kMpirun, "OMPI_COMM_WORLD_SIZE", "65537")) == "environment variable OMPI_COMM_WORLD_SIZE");
  CHECK(refused_in(with(kSrun, "SLURM_NODEID", "3")) == "environment variable SLURM_STEP_TASKS_PER_NODE");
  CHECK(refused_in(without(kSrun, "SLURM_PROCID")) == "environment variable SLURM_PROCID");
}
