// Fault: a library, but no plugin.
extern "C" int quern_test_something_else() { return 1; }
