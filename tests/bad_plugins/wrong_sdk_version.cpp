// Fault: built with the headers of another SDK version. Nothing of it may run.
#include <cstdlib>

#include "quern/plugin.h"

QUERN_PLUGIN_NOTE("sdk=99\0abi=" QUERN_ABI_TAG "\0compiler=" QUERN_COMPILER "\0kind=log\0id=wrong_sdk_version");

static const bool runs = (std::abort(), true);
