// Fault: built by a compiler whose C++ objects differ. Nothing of it may run.
#include <cstdlib>

#include "quern/plugin.h"

QUERN_PLUGIN_NOTE(
    "sdk=" QUERN_STRINGIFY(QUERN_SDK_VERSION) "\0abi=cxxabi9999-cxx98\0compiler=cfront 3\0kind=log\0id=wrong_abi_tag");

static const bool runs = (std::abort(), true);
