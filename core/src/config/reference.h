#pragma once
// The options as text for people, from the same declarations that validate the config.

#include <string>
#include <vector>

#include "config/schema.h"
#include "plugin/plugin_host.h"

namespace quern {

/// A Markdown table of options, padded so that it also reads well in a terminal: key, value, default, meaning.
std::string options_table(const std::vector<OptionSpec>& options);

/// The reference page: a table for each section and for each plugin that it may select. The same schemas and plugins
/// give the same bytes. A plugin that cannot be loaded is there with its refusal.
std::string reference_markdown(const std::vector<SectionSchema>& schemas, PluginHost& host);

}  // namespace quern
