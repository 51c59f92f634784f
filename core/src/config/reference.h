#pragma once
// The options as text for people, from the same declarations that validate the config.

#include <string>
#include <vector>

#include "config/schema.h"
#include "plugin/plugin_host.h"

namespace quern {

/// A Markdown table of options, padded so that it also reads well in a terminal: key, value, default, meaning. With
/// `most` above 0 its cells are wrapped, which is no Markdown, so that lines have about as many columns.
std::string options_table(const std::vector<OptionSpec>& options, std::size_t most = 0);

/// The reference page: a table for each section and for each plugin that it may select. The same schemas and plugins
/// give the same bytes. A plugin that cannot be loaded is there with its refusal.
std::string reference_markdown(const std::vector<SectionSchema>& schemas, PluginHost& host, std::size_t most = 0);

}  // namespace quern
