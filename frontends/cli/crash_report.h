#pragma once
// A crash leaves one line on standard error: the signal, the library in which it came, and the plugin that had called
// it, if any. Then the program ends by that signal, as it would without the line.

namespace quern::cli {

/// From here on, for the whole process and its forks. Whoever takes one of these signals later (MPI does) keeps it.
void report_crashes();

}  // namespace quern::cli
