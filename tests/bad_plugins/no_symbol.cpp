// Fault: a note, but no entry.
#include "quern/plugin.h"

QUERN_PLUGIN_NOTE("sdk=" QUERN_STRINGIFY(QUERN_SDK_VERSION) "\0abi=" QUERN_ABI_TAG "\0compiler=" QUERN_COMPILER
                                                            "\0kind=log\0id=no_symbol");
