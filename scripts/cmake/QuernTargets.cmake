# How quern's targets are made: warnings, visibility, where a plugin's file goes, how a test is found.
# A source folder is one target; its *_test.cpp files are that target's test program.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()

add_compile_definitions(QUERN_VERSION="${PROJECT_VERSION}")
# Floats are not contracted: equal source gives equal bits in every translation unit. Kernels may choose otherwise.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off> $<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns of faults inside std::variant, std::map and std::string where there are none.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized> $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(QUERN_SANITIZE)
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()
if(QUERN_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()

# quern_sources(<variable>): the folder's sources without tests and benchmarks, recursively; <variable>_TESTS: its tests.
macro(quern_sources variable)
  file(GLOB_RECURSE ${variable} CONFIGURE_DEPENDS *.cpp *.cu)
  set(${variable}_TESTS ${${variable}})
  list(FILTER ${variable} EXCLUDE REGEX "_(test|bench)\\.cpp$")
  list(FILTER ${variable}_TESTS INCLUDE REGEX "_test\\.cpp$")
endmacro()

# quern_add_test(<name> SOURCES ... LINK ... [LABELS ...]): a doctest program, each case a ctest test.
function(quern_add_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT QUERN_TESTS OR NOT arg_SOURCES)
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE quern_test_main ${arg_LINK})
  target_compile_definitions(${name} PRIVATE QUERN_SOURCE_DIR="${PROJECT_SOURCE_DIR}" QUERN_BUILD_DIR="${CMAKE_BINARY_DIR}")
  if("untrusted" IN_LIST arg_LABELS)
    if(NOT TARGET untrusted_tests)
      add_custom_target(untrusted_tests)  # what the sanitized build is for
    endif()
    add_dependencies(untrusted_tests ${name})
  endif()
  # doctest's script takes one word for a property: a test has one label.
  set(label unit)
  if(arg_LABELS)
    list(GET arg_LABELS 0 label)
  endif()
  doctest_discover_tests(${name} TEST_PREFIX "${name}: " PROPERTIES SKIP_REGULAR_EXPRESSION "skipped:" TIMEOUT 300 LABELS ${label})
endfunction()

# quern_add_module(<name> [DEPENDS modules...] [LINK libraries...] [LABELS ...]): a part of the core, as objects.
function(quern_add_module name)
  cmake_parse_arguments(arg "" "" "DEPENDS;LINK;LABELS" ${ARGN})
  quern_sources(sources)
  if(NOT sources)
    return()
  endif()
  add_library(quern_${name} OBJECT ${sources})
  target_include_directories(quern_${name} PUBLIC ${PROJECT_SOURCE_DIR}/core/include ${PROJECT_SOURCE_DIR}/core/src)
  target_link_libraries(quern_${name} PUBLIC fmt::fmt-header-only ${arg_LINK})
  set_property(GLOBAL APPEND PROPERTY QUERN_MODULES quern_${name})
  quern_add_test(${name}_test SOURCES ${sources_TESTS} LINK quern quern_testkit ${arg_LINK} LABELS ${arg_LABELS})
endfunction()

# quern_add_plugin(<kind> <id> [LINK ...] [TEST_LINK ...] [LABELS ...]): the folder as a shared library in plugins/<kind>/.
# Its tests are compiled together with its sources, so they see what the library hides.
function(quern_add_plugin kind id)
  cmake_parse_arguments(arg "" "" "LINK;TEST_LINK;LABELS" ${ARGN})
  quern_sources(sources)
  set(target quern_${kind}_${id})
  add_library(${target}_objects OBJECT ${sources})
  set_target_properties(${target}_objects PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_include_directories(${target}_objects PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(${target}_objects PUBLIC quern_headers ${arg_LINK})
  add_library(${target} MODULE)
  target_link_libraries(${target} PRIVATE ${target}_objects quern ${arg_LINK})
  if(NOT QUERN_SANITIZE AND NOT QUERN_FUZZ)
    target_link_options(${target} PRIVATE -Wl,--no-undefined)  # a missing library shows here, not when users load it
  endif()
  set_target_properties(${target} PROPERTIES OUTPUT_NAME quern_${id} PREFIX "lib"
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/plugins/${kind})
  install(TARGETS ${target} LIBRARY DESTINATION lib/quern/plugins/${kind})
  set_property(GLOBAL APPEND PROPERTY QUERN_PLUGINS ${target})
  quern_add_test(${kind}_${id}_test SOURCES ${sources_TESTS}
    LINK ${target}_objects quern quern_testkit ${arg_LINK} ${arg_TEST_LINK} LABELS ${arg_LABELS})
endfunction()
