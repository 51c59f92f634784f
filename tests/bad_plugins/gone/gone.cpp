extern "C" void quern_test_library_that_is_gone() {}
