// gradient_table CONFIG [STEPS] [a.b=v]...: trains STEPS (default 50) steps in fp32, then prints in Markdown how the
// gradients of one micro-batch under each precision agree with the gradients in fp32 and bf16, and, as a yardstick, how
// another micro-batch's do.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>

#include "gradient_comparison.h"
#include "quern/error.h"

namespace quern::testing {

namespace {

std::string fixed(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string row(const std::string& name, const std::vector<std::string>& cells) {
  std::string line = "| " + name + " |";
  for (const std::string& cell : cells) line += " " + cell + " |";
  return line + "\n";
}

/// The gradients after the one at `reference` against that one.
std::string table(const GradientProbe& probe, const std::vector<GradientRecipe>& recipes,
                  const std::vector<ParameterTensors>& gradients, std::size_t reference) {
  std::vector<std::string> names, least, rule;
  std::vector<double> worst(recipes.size(), 1);
  for (std::size_t i = reference + 1; i < recipes.size(); ++i) names.push_back(recipes[i].name), rule.push_back("---");
  std::string text = row("against " + recipes[reference].name, names) + row("---", rule);
  for (const std::string& parameter : probe.parameters()) {
    std::vector<std::string> cells;
    for (std::size_t i = reference + 1; i < recipes.size(); ++i) {
      Agreement found = agreement(gradients[i].at(parameter), gradients[reference].at(parameter));
      worst[i] = std::min(worst[i], found.least);
      cells.push_back(fixed("%.5f", found.cosine) + ", " + fixed("%.4f", found.norm_ratio));
    }
    text += row(parameter, cells);
  }
  for (std::size_t i = reference + 1; i < recipes.size(); ++i) least.push_back(fixed("%.5f", worst[i]));
  return text + row("least cosine of one tensor", least);
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.empty())
    throw Error(
        ErrorCode::config,
        {.where = "gradient_table", .what = "no config", .next = "call gradient_table CONFIG [STEPS] [a.b=v]..."});
  ConfigDocument config = ConfigDocument::read(arguments[0]);
  std::int64_t steps = 50;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.find_first_not_of("0123456789") == std::string::npos && argument.size() < 10)
      steps = std::atoll(argument.c_str());
    else
      config.set(argument);
  }
  GradientProbe probe(config, steps);
  std::vector<GradientRecipe> recipes = gradient_recipes();
  std::vector<ParameterTensors> gradients;
  for (const GradientRecipe& recipe : recipes) gradients.push_back(probe.gradients(recipe));
  // The yardstick: what precision changes matters less where it is small beside what the choice of data changes.
  gradients.push_back(probe.gradients(recipes[0], GradientProbe::Measured::another));
  recipes.push_back({"fp32, another batch", {}});
  std::cout << "After " << steps << " steps in fp32";
  if (steps > 0) std::cout << " (loss " << fixed("%.3f", probe.loss()) << ")";
  std::cout << ". Cells: cosine, ratio of norms.\n\n"
            << table(probe, recipes, gradients, 0) << "\n"
            << table(probe, recipes, gradients, 1);
  return 0;
}

}  // namespace

}  // namespace quern::testing

int main(int argc, char** argv) {
  try {
    return quern::testing::run({argv + 1, argv + argc});
  } catch (const quern::Error& error) {
    std::cerr << "gradient_table: " << error.what() << "\n";
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    std::cerr << "gradient_table: " << error.what() << "\n";
    return 1;
  }
}
