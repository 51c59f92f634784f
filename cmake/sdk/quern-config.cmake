# find_package(quern), as before SDK 11: goes on with a warning, since it does not say for which SDK a project is written.
include(${CMAKE_CURRENT_LIST_DIR}/../quern_sdk/quern_sdk-config.cmake)
