# The static library `tfx`, which the command line in C and the layer in C++ are built on.
#
# TFX_SANITIZE: sanitizers to build with. TFX_WERROR: warnings fail the build.

# ---- what is needed ----

find_package(onnxruntime CONFIG QUIET)
if(TARGET onnxruntime::onnxruntime)
  get_target_property(TFX_ORT_HINTS onnxruntime::onnxruntime INTERFACE_INCLUDE_DIRECTORIES)
endif()
find_path(ONNXRUNTIME_INCLUDE_DIR onnxruntime_c_api.h
  HINTS ${TFX_ORT_HINTS} $ENV{ONNXRUNTIME_ROOT}/include
  PATH_SUFFIXES onnxruntime onnxruntime/core/session
  DOC "folder of onnxruntime_c_api.h")
if(NOT EXISTS "${ONNXRUNTIME_INCLUDE_DIR}/onnxruntime_c_api.h")
  message(FATAL_ERROR
    "onnxruntime_c_api.h is missing: install libonnxruntime-dev (Debian 13 and later) or onnxruntime (brew), or unpack "
    "a release of https://github.com/microsoft/onnxruntime and set the environment variable ONNXRUNTIME_ROOT to it "
    "(or give -DONNXRUNTIME_INCLUDE_DIR=.../include)")
endif()

find_path(CJSON_INCLUDE_DIR cjson/cJSON.h DOC "folder of cjson/cJSON.h")
find_library(CJSON_LIBRARY cjson DOC "the cJSON library")
if(NOT CJSON_INCLUDE_DIR OR NOT CJSON_LIBRARY)
  message(FATAL_ERROR "cJSON is missing: install libcjson-dev (Debian) or cjson (brew)")
endif()

find_package(OpenSSL QUIET COMPONENTS Crypto)
if(NOT TARGET OpenSSL::Crypto)
  message(FATAL_ERROR
    "OpenSSL is missing: install libssl-dev (Debian) or openssl@3 (brew, with "
    "-DOPENSSL_ROOT_DIR=$(brew --prefix openssl@3))")
endif()

find_package(Threads REQUIRED)

# ---- the library ----

add_library(tfx STATIC
  ${CMAKE_CURRENT_LIST_DIR}/arguments.c
  ${CMAKE_CURRENT_LIST_DIR}/bundle.c
  ${CMAKE_CURRENT_LIST_DIR}/cast.c
  ${CMAKE_CURRENT_LIST_DIR}/check.c
  ${CMAKE_CURRENT_LIST_DIR}/check_stages.c
  ${CMAKE_CURRENT_LIST_DIR}/cores.c
  ${CMAKE_CURRENT_LIST_DIR}/embed.c
  ${CMAKE_CURRENT_LIST_DIR}/encoder.c
  ${CMAKE_CURRENT_LIST_DIR}/error.c
  ${CMAKE_CURRENT_LIST_DIR}/external.c
  ${CMAKE_CURRENT_LIST_DIR}/feeds.c
  ${CMAKE_CURRENT_LIST_DIR}/file.c
  ${CMAKE_CURRENT_LIST_DIR}/golden.c
  ${CMAKE_CURRENT_LIST_DIR}/json.c
  ${CMAKE_CURRENT_LIST_DIR}/library.c
  ${CMAKE_CURRENT_LIST_DIR}/lists.c
  ${CMAKE_CURRENT_LIST_DIR}/manifest.c
  ${CMAKE_CURRENT_LIST_DIR}/manifest_rest.c
  ${CMAKE_CURRENT_LIST_DIR}/maps.c
  ${CMAKE_CURRENT_LIST_DIR}/parity.c
  ${CMAKE_CURRENT_LIST_DIR}/print.c
  ${CMAKE_CURRENT_LIST_DIR}/report.c
  ${CMAKE_CURRENT_LIST_DIR}/safetensors.c
  ${CMAKE_CURRENT_LIST_DIR}/session.c
  ${CMAKE_CURRENT_LIST_DIR}/tensor.c
  ${CMAKE_CURRENT_LIST_DIR}/texts.c
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer.c
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_added.c
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_bpe.c
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_form.c
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_model.c
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_normal.c
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_pattern.c
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_post.c
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_split.c
  ${CMAKE_CURRENT_LIST_DIR}/unicode.c)
target_include_directories(tfx
  PUBLIC $<BUILD_INTERFACE:${CMAKE_CURRENT_LIST_DIR}/../include> $<INSTALL_INTERFACE:include>
  PRIVATE ${CMAKE_CURRENT_LIST_DIR})
target_include_directories(tfx SYSTEM PRIVATE ${ONNXRUNTIME_INCLUDE_DIR} ${CJSON_INCLUDE_DIR})
target_link_libraries(tfx PUBLIC ${CJSON_LIBRARY} OpenSSL::Crypto Threads::Threads ${CMAKE_DL_LIBS} m)
set_target_properties(tfx PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
target_compile_options(tfx PRIVATE -Wall -Wextra -Wpedantic -Wconversion -Wshadow)
if(TFX_WERROR)
  target_compile_options(tfx PRIVATE -Werror)
endif()
if(TFX_SANITIZE)
  target_compile_options(tfx PUBLIC -fsanitize=${TFX_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
  target_link_options(tfx PUBLIC -fsanitize=${TFX_SANITIZE})
endif()
