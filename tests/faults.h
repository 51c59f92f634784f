#pragma once
// Faults that a user may meet, each as files and the command that meets them. faults_test.cpp runs all of them on the
// program, checks code and message, and keeps docs/faults.md equal to what was seen.

#include <functional>
#include <string>
#include <vector>

#include "end_to_end.h"

namespace quern::testing {

struct Fault {
  std::string name;                ///< what is wrong, as the table has it
  int code = 0;                    ///< exit code
  std::vector<std::string> parts;  ///< of the message: file and place, found, expected, next step
  /// Spoils the files and gives the words behind `quern`.
  std::function<std::vector<std::string>(const TinyFiles&)> prepare;
};

std::vector<Fault> config_faults();
std::vector<Fault> model_config_faults();
std::vector<Fault> weight_faults();
std::vector<Fault> token_file_faults();
std::vector<Fault> run_faults();

}  // namespace quern::testing
