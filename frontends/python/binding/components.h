#pragma once
// The calling program's data and log sink, as implementations with the id "python". They ask it through one function.

#include <string>

#include <nlohmann/json.hpp>

#include "quern/plugin.h"

namespace quern::python {

/// Answers a method: arguments are a JSON object, and the answer a text. Not 0: it failed, and the answer says why.
/// Called from any thread.
using Callback = int (*)(const char* method, const char* arguments, std::string* answer);

/// A dataset, and a log sink, that ask the callback:
///   "validates"                       "yes" where there is a validation split
///   "length" {split}                  rows of one pass, "" when unknown
///   "next" {split, rows, sequence, vocabulary, tokens, targets, positions}: fills the arrays of int32 (rows, sequence)
///                                     at these addresses, as Batch has them
///   "save_state" {split}, "load_state" {split, state}
///   "log" an event, as log.jsonl has it
Manifest components(Callback callback);

}  // namespace quern::python
