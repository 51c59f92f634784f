// plan_table CONFIG [a.b=v]...: plans the config under precisions, recomputation, ranks, shards and stores, and prints
// a line for each plan: its bytes of the device and the host, the seconds of a step, and the seconds that planning
// took. plan_table --compare BEFORE AFTER: how the plans of two such tables differ. A change of the planner shows there
// what it makes larger or slower. Needs no GPU: `device.cuda.assume=H100`.
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/clock.h"
#include "quern/error.h"
#include "run/session.h"

namespace quern::testing {

namespace {

using Overrides = std::vector<std::string>;
/// A column's name, and its ways.
using Ways = std::vector<std::pair<std::string, Overrides>>;

std::vector<Ways> columns() {
  const std::string optimizer = "parallel.shard_optimizer=ranks", weights = "parallel.shard_weights=ranks",
                    gradients = "parallel.shard_gradients=ranks";
  Ways ranks{{"1", {}}};
  for (const std::string count : {"2", "4", "8"}) {
    const Overrides group{"parallel.ranks=" + count, "parallel.communicator=memcpy"};
    auto with = [&](Overrides more) {
      more.insert(more.end(), group.begin(), group.end());
      return more;
    };
    ranks.emplace_back(count + " whole", with({}));
    ranks.emplace_back(count + " optimizer", with({optimizer}));
    ranks.emplace_back(count + " gradients", with({optimizer, gradients}));
    ranks.emplace_back(count + " all", with({optimizer, gradients, weights}));
  }
  const Overrides state{"memory.master=host", "memory.moments=host"};
  auto and_also = [&](Overrides more) {
    more.insert(more.end(), state.begin(), state.end());
    return more;
  };
  return {{{"bf16", {"precision.id=bf16"}}, {"e4m3", {"precision.id=e4m3"}}, {"int8", {"precision.id=int8"}}},
          {{"-", {}}, {"block", {"memory.recompute=[\"block\"]"}}},
          ranks,
          {{"device", {}},
           {"moments", {"memory.moments=host"}},
           {"master moments", state},
           {"master moments activations", and_also({"memory.activations=host"})},
           {"master moments activations weights gradients",
            and_also({"memory.activations=host", "memory.weights=host", "memory.gradients=host"})}}};
}

/// "refused" where no such plan is made.
std::string figures(const std::string& file, const Overrides& overrides) {
  try {
    const ConfiguredRun run(ConfigDocument::read(file, overrides));
    const double begin = now();
    const Plan plan = make_plan(run.session.parts(), run.session.plan_options());
    return fmt::format("{}\t{}\t{:.6f}\t{:.3f}", plan.device_bytes, plan.host_bytes(), plan.seconds_per_step,
                       now() - begin);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal) throw;
    return "refused";
  }
}

void print_table(const std::string& file, const Overrides& common) {
  const std::vector<Ways> all = columns();
  std::vector<std::size_t> at(all.size(), 0);
  for (bool more = true; more;) {
    std::string name;
    Overrides overrides = common;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto& [way, settings] = all[i][at[i]];
      name += (i ? ", " : "") + way;
      overrides.insert(overrides.end(), settings.begin(), settings.end());
    }
    std::cout << name << "\t" << figures(file, overrides) << std::endl;
    more = false;
    for (std::size_t i = all.size(); i-- > 0 && !more;) {
      more = ++at[i] < all[i].size();
      if (!more) at[i] = 0;
    }
  }
}

std::map<std::string, std::vector<double>> read_table(const std::string& path) {
  std::map<std::string, std::vector<double>> table;
  std::ifstream file(path);
  if (!file) throw Error(ErrorCode::input, {.where = path, .what = "cannot be read"});
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line.substr(line.find('\t') + 1));
    std::vector<double>& row = table[line.substr(0, line.find('\t'))];
    for (double figure = 0; fields >> figure;) row.push_back(figure);
  }
  return table;
}

void compare(const std::string& before, const std::string& after) {
  const auto old_table = read_table(before), new_table = read_table(after);
  constexpr const char* kFigures[] = {"device bytes", "host bytes", "seconds of a step"};
  int counts[3][3] = {}, refused = 0, allowed = 0, both = 0;
  for (const auto& [name, row] : new_table) {
    const auto known = old_table.find(name);
    if (known == old_table.end()) continue;
    const std::vector<double>& old_row = known->second;
    refused += !old_row.empty() && row.empty();
    allowed += old_row.empty() && !row.empty();
    if (old_row.empty() || row.empty()) continue;
    ++both;
    for (std::size_t i = 0; i < 3; ++i) {
      const double change = row[i] - old_row[i], least = i == 2 ? 1e-4 * old_row[i] : 0;  // times are rounded
      const int way = change < -least ? 0 : change > least ? 2 : 1;
      ++counts[i][way];
      if (way == 2) std::cout << fmt::format("{}: {} {} -> {}\n", name, kFigures[i], old_row[i], row[i]);
    }
  }
  std::cout << fmt::format("{} plans, {} now refused, {} no more\n", both, refused, allowed);
  for (std::size_t i = 0; i < 3; ++i)
    std::cout << fmt::format("{}: {} smaller, {} equal, {} larger\n", kFigures[i], counts[i][0], counts[i][1],
                             counts[i][2]);
}

}  // namespace

}  // namespace quern::testing

int main(int count, char** arguments) {
  const std::vector<std::string> words(arguments + 1, arguments + count);
  try {
    if (words.size() == 3 && words[0] == "--compare")
      quern::testing::compare(words[1], words[2]);
    else if (!words.empty())
      quern::testing::print_table(words[0], {words.begin() + 1, words.end()});
    else
      throw quern::Error(quern::ErrorCode::config, {.where = "plan_table", .what = "no config"});
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "plan_table: " << error.what() << "\n";
    return 1;
  }
}
